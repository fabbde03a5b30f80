"""How fast the operators of course_ops are: rows of the lessons whose last rungs they ship."""

from lessonkit.base.markdown import markdown
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import results

# The operators of results.OPERATORS that each function computes, forward first.
SHIPPED = {
    "attention": ("attention", "attention backward", "decoding"),
    "softmax": ("softmax", "softmax backward"),
    "layer_norm": ("layernorm", "layernorm backward"),
    "rms_norm": ("rmsnorm", "rmsnorm backward"),
    "add_norm": ("add + layernorm", "add + layernorm backward"),
    "cross_entropy": ("cross-entropy", "cross-entropy backward"),
    "gelu": ("GELU",),
    "dropout": ("dropout",),
    "matmul": ("matmul", "skinny matmul"),
    "linear": ("epilogue", "epilogue backward"),
    "grouped_matmul": ("grouped matmul",),
    "matmul_fp8": ("fp8 matmul",),
    "quantize": ("quantisation",),
    "scan": ("scan",),
}
LANGUAGES = ("Triton", "Gluon")  # what course_ops' kernels are written in
MARK = "\\*"
HEADS = {
    "en": ["course_ops.", "operator", "shape", "ms", "best peer", "its ms", "ratio"],
    "zh": ["course_ops.", "算子", "形状", "ms", "最快的对手", "对手的 ms", "比值"],
}
MARKED = {
    "en": f"{MARK} Measured before the code, the inputs or a peer of that line changed.",
    "zh": f"{MARK} 测量之后，这一行的代码、输入或对手改过。",
}


def speed(language: str, today: Today) -> str:
    """A table for each GPU: each operator at the largest shape that most of its lessons measured, beside its best peer.

    ms: of the fastest rung there, whose kernel course_ops ships. ratio: the peer's ms over ours.
    """
    parts = []
    for folder in device_folders():
        found = {contest.name: contest for contest in results.contests(folder, LANGUAGES)}
        body = []
        for function, operators in SHIPPED.items():
            for contest in (found[name] for name in operators if name in found):
                best, peer = contest.best, contest.peer
                if peer is None:
                    continue
                old = f" {MARK}" * bool(today.why_old(best) or today.why_old(peer))
                line = [f"`{function}`", contest.name, f"{contest.shape} {contest.dtype}", f"{best.ms_p50:.4g}{old}"]
                body.append([*line, peer.rung, f"{peer.ms_p50:.4g}", f"{peer.ms_p50 / best.ms_p50:.2f}"])
        if body:
            marked = f"\n{MARKED[language]}\n" * any(line[3].endswith(MARK) for line in body)
            parts.append(f"### {folder.name}\n\n" + markdown(HEADS[language], body) + marked)
    return "\n".join(parts) or "No GPU has been measured yet.\n"
