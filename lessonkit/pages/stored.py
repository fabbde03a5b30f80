"""What tables of steps say in words: rows keep it in English, the pages say it in the reader's language.

A step writes its table's name, note, heads and cells where it measures them. Figures stand in braces here. A phrase
that is not here is shown in English, and tests/test_web.py names it.
"""

import re

from lessonkit.base.words import language, later, retold

NAMES = (  # names of tables
    later("a step"),
    later("agreement"),
    later("batch-size"),
    later("clocks"),
    later("operators"),
    later("plans"),
    later("saved-for-backward"),
    later("streams"),
    later("what each can see"),
    later("architectures"),
    later("choices"),
    later("coalescing"),
    later("compare all"),
    later("constant data"),
    later("counted"),
    later("counters"),
    later("days"),
    later("discussed"),
    later("estimated and measured"),
    later("every rung"),
    later("exchange"),
    later("flame"),
    later("heat maps"),
    later("host time"),
    later("ladders"),
    later("late errors"),
    later("layouts"),
    later("narrow accumulators"),
    later("one rounding"),
    later("one statement"),
    later("overhead"),
    later("peak memory"),
    later("pieces"),
    later("placed"),
    later("ranking"),
    later("replaced"),
    later("right alone"),
    later("rounded inputs"),
    later("speed"),
    later("sweep"),
    later("the budget"),
    later("tools"),
    later("tritons too"),
    later("whole products"),
    later("allclose on tiny numbers"),
    later("clocks and power"),
    later("cold and warm L2"),
    later("counters beside counts"),
    later("cut off or rounded"),
    later("launches in a row"),
    later("one product, four ways"),
    later("order of additions"),
    later("percent of cuBLAS by rung"),
    later("roofline of the step"),
    later("too few repeats"),
)
HEADS = (  # heads of columns
    later("FLOPs a byte"),
    later("MB read"),
    later("MB written"),
    later("also"),
    later("calls"),
    later("changes"),
    later("choice"),
    later("command"),
    later("configuration"),
    later("configurations"),
    later("costs"),
    later("counter"),
    later("cycles a ns"),
    later("degrees C"),
    later("estimated cycles"),
    later("expression"),
    later("factor"),
    later("format"),
    later("in shares"),
    later("largest"),
    later("least"),
    later("limit"),
    later("lines"),
    later("load bytes"),
    later("measured us"),
    later("memory %"),
    later("model"),
    later("module"),
    later("most"),
    later("now"),
    later("optimizer"),
    later("other SDPA"),
    later("path"),
    later("peak GB"),
    later("peak MB"),
    later("product"),
    later("size"),
    later("strides"),
    later("tensor columns"),
    later("tensor loads"),
    later("timings"),
    later("value"),
    later("version"),
    later("waits"),
    later("warps %"),
    later("was"),
    later("a lane"),
    later("call"),
    later("elements"),
    later("field"),
    later("mend"),
    later("piece"),
    later("way"),
    later("where"),
    later("% of cuBLAS at {size}"),
    later("% of its limit"),
    later("% of the data sheet"),
    later("% of the limit, rung by rung"),
    later("Gluon, ms"),
    later("Triton, ms"),
    later("MB a copy moves"),
    later("MB in and out"),
    later("TB/s of counted bytes"),
    later("about s on a GPU"),
    later("allclose takes zeros"),
    later("at its smallest"),
    later("beside a neighbour"),
    later("best peer, ms"),
    later("best, measured"),
    later("best, predicted"),
    later("both, no messages"),
    later("cold / warm"),
    later("cold us"),
    later("copies, barriers"),
    later("elements an ns"),
    later("extra bytes"),
    later("first rung's"),
    later("forward and backward"),
    later("forward, no messages"),
    later("how to read it"),
    later("in columns"),
    later("its us"),
    later("last rung"),
    later("lines in all"),
    later("lines that differ: TTIR"),
    later("loads a lane"),
    later("median error of the time"),
    later("median ratio"),
    later("ms a step"),
    later("of roof"),
    later("% of cuBLAS"),
    later("after s"),
    later("batch"),
    later("columns of V's tile"),
    later("config"),
    later("pass"),
    later("peak KB"),
    later("predicted us"),
    later("rank"),
    later("read, never set"),
    later("MMA cycles"),
    later("chosen"),
    later("compute-sanitizer, by its documentation"),
    later("copy cycles"),
    later("rows a million multiply-adds"),
    later("shifted"),
    later("tiles"),
    later("Triton, by its source"),
    later("waves"),
    later("without a GPU"),
    later("the compiler"),
    later("of this statement"),
    later("on the busiest SM"),
    later("one message"),
    later("one of them"),
    later("only numbers"),
    later("over eager PyTorch"),
    later("over its peers"),
    later("programs a ms"),
    later("programs an SM"),
    later("rank correlation"),
    later("registers, warps"),
    later("right, worst order"),
    later("roof ms"),
    later("shared bytes"),
    later("tensors kept"),
    later("that is"),
    later("the barrier is"),
    later("the error is raised"),
    later("the same"),
    later("us a call"),
    later("us between events"),
    later("us of the host"),
    later("waits for"),
    later("warm over the floor"),
    later("warm us"),
    later("warps an SM"),
    later("which is"),
    later("worst over best"),
    later("wrong calls"),
    later("wrong numbers"),
    later("wrong winner, predicted"),
)
SHOWN = {  # columns that steps name as fields -> the head that pages show, with the unit in words
    "GB_per_s": later("GB/s"),
    "KB_in_flight": later("KB in flight"),
    "TB_per_s": later("TB/s"),
    "images_per_s": later("images a second"),
    "ns_a_load": later("ns a load"),
    "ns_a_round": later("ns a round"),
    "ns_a_sum": later("ns a sum"),
    "over_fp32": later("times as fast as fp32"),
    "predicted_us": later("predicted us a step"),
    "shared_bytes": later("shared memory, bytes"),
    "us_per_call": later("us a call"),
    "us_per_step": later("us a step"),
    "useful_TB_per_s": later("useful TB/s"),
}
CELLS = (  # cells
    later("bare function"),
    later("bytes through L2"),
    later("copy engine"),
    later("cut off"),
    later("measured best"),
    later("n, rounded up"),
    later("own chain"),
    later("predicted best"),
    later("sums of 64"),
    later("worst predicted"),
    later("{version} or newer"),
    later("% of memory's peak"),
    later("% of the SMs' peak"),
    later("% of warps resident"),
    later("bytes from memory"),
    later("bytes to memory"),
    later("the course's fastest over the best peer"),
    later("this lesson"),
    later("6 Hopper, in Gluon"),
    later("torch, fast accumulation"),
    later("{calls} calls, under the scope 'softmax' with its bytes"),
    later("{calls} calls of {kernel}; no counters"),
    later("{tile}, {warps} warps, {stages} stages, groups of {groups}"),
    later("{warps} warps, {stages} stages, groups of {groups}"),
    later("the base: sm_{target}, {warps} warps, {stages} stages"),
    later("{percent}% of the limit's speed, {times}x v1 pinned"),
    later(
        "{count} floats each way: in {into} ms ({in_rate} GB/s), compute {compute} ms, out {out} ms ({out_rate} GB/s); "
        "sum {sum} ms; limit, the longest of the three, {limit} ms"
    ),
    later("v3 engines, a quarter each"),
    later("legacy stream between"),
    later("9.0 is Hopper (sm_90): TMA and wgmma exist; 8.x is Ampere and Ada"),
    later("Enabled: you see a slice of the card, with fewer SMs and less bandwidth"),
    later("GPU matmuls round to 10 bits: more FLOP/s, as many launches"),
    later("MHz now; idle cards clock down, and a matmul at the power limit does too"),
    later("P0 is full speed, P8 is asleep; an idle card takes milliseconds to wake, so warm up before timing"),
    later("TMA and wgmma rungs"),
    later("a mask on the rows"),
    later("above a few hundred MiB before you start: somebody else is on this card"),
    later("above about 85 C the clock falls too"),
    later("any, 4 warps a program"),
    later("at the addition after it"),
    later("at the launch"),
    later("at the limit the clock falls, so the same kernel times differently an hour later"),
    later("attention, and a model with the op replaced"),
    later(
        "all-reduce of {count} floats on {gpus} GPUs: {size} MB each way and GPU (predicted: {ms} ms at {rate} GB/s)"
    ),
    later("copies of {size} MB between GPUs {one} and {other} (predicted: {ms} ms at {rate} GB/s)"),
    later("copy engines, both ways"),
    later("custom_op, recording a gradient"),
    later("{rate} GB/s a direction, {percent}% of NVLink's"),
    later("kernel that loads from {gpu}"),
    later("kernel that stores into {gpu}"),
    later("kernels that store, both ways"),
    later("through the host"),
    later("cpu of {machine}"),
    later("gpu of {machine}"),
    later("elementwise chains become one kernel: fewer launches and fewer bytes"),
    later("every second column"),
    later("expect, one tensor"),
    later("gloo, on the CPU"),
    later("half the bytes, tensor cores (a CPU: AMX or AVX-512 BF16), but more launches: the casts"),
    later("host's clock, launches in a row"),
    later("latency: neither is busy; more bytes or products in flight"),
    later("matmul in Triton"),
    later("one launch for the whole step: what is left is the kernels' own time"),
    later("one row expanded"),
    later("rows {count} elements apart"),
    later("share of time in which *any* kernel ran: one busy SM of 132 also reads 100 %"),
    later("a Triton kernel"),
    later("a torch operator"),
    later("{rung}, {warps} warps"),
    later("compiled by nvcc; run by g++ in an emulator of threads, warps and barriers"),
    later("compiled only: TMA and wgmma need a Hopper GPU (sm_90)"),
    later("from compiled code"),
    later("interpreted, and compiled for sm_80, sm_90, sm_100"),
    later("no: needs {parts}"),
    later("a Hopper GPU, THUNDERKITTENS_ROOT"),
    later("a Hopper GPU, nvcc 12.8 or newer, THUNDERKITTENS_ROOT"),
    later("nvcc 12.8 or newer, THUNDERKITTENS_ROOT"),
    later("no: neither nvcc nor g++"),
    later("none here"),
    later("on the CPU"),
    later("on the GPU"),
    later("predicted; committed figures"),
    later("PyTorch, autograd, torch.compile"),
    later("run by g++ in an emulator of threads, warps and barriers; not compiled: no nvcc"),
    later("this cpu"),
    later("Triton kernels"),
    later("two processes"),
    later("sm_80 (Ampere) or newer"),
    later("softmax_shared, all of it"),
    later("the GPU by measurement"),
    later("the baseline: a kernel for each operator"),
    later("the kernel module's version; it fixes the newest CUDA that can run"),
    later("the model; H100 and H200 have the same cores, the H200 more and faster memory"),
    later("the same in a CUDA graph"),
    later("all keys"),
    later("tuning, roofline, comparison"),
    later("two cards of one model with different limits are different machines"),
    later("weights, activations and every temporary have to fit"),
    later("you name it"),
    later("you, in bits"),
)
WORDS = (  # cells of one word that are no names; a reader of another language sees them translated
    later("all"),
    later("row-major"),
    later("transposed"),
    later("gradients"),
    later("outputs"),
)
NOTES = (  # notes, and claims that a step makes
    later("D = {D}, {keys}: {kind} within the budget, then timed in turns."),
    later("bf16, 16384 tokens, {heads} heads of {D}. Peak: beyond the inputs, forward and backward."),
    later("bf16, 16384 tokens, {heads} heads of {D}. Peak: beyond the inputs, forward."),
    later(
        "Beyond Q, K, V; {heads} heads of D = {D}, batch 1, {dtype}. Each line is a power of S: its slope is the "
        "exponent."
    ),
    later("For an H200, from the compiled code alone: the best, middle and worst."),
    later(
        "No GPU: the CPU's time in operators; ours are interpreted, so it is Python's. In all {before} calls before, "
        "{after} after."
    ),
    later("The four plans of the fewest estimated cycles, on {sms} SMs."),
    later(
        "Times of a CPU, where a small operator costs what calling it costs. Matmuls have {flops}% of the FLOPs and "
        "{time}% of the time. MB: each tensor once. What waits for memory, whose roof comes from MB, gains from fusion "
        "and from smaller dtypes: lesson 18."
    ),
    later("fp32, of sqrt(K)."),
    later(
        "A model without error would have the same cycles a ns in each row: the clock's. Here the median is {median}, "
        "and eight rows of ten lie between {least} and {most}. Below the median a kernel was slower than estimated, "
        "above it faster."
    ),
    later(
        "Launches: counted by the profiler on a GPU, as dispatched operators on a CPU (compiled C++ loops do not show "
        "there). At the small batch a GPU follows the launches: fewer is faster, TF32 or bf16 change little. At the "
        "large one it follows FLOPs and bytes. The cheapest rung of all is a larger batch: as many launches. A CPU has "
        "cheap launches, so it gains little from any of them but bf16 where it has the instructions."
    ),
    later(
        "{sms} SMs. Time follows the busiest SM, so {more} programs cost what {most} do: a grid that just overruns a "
        "multiple wastes nearly a whole round (wave quantization). With many rounds the waste is small."
    ),
    later("2^26 + 3 floats in, 1500 turns an element, and out again. The limit is the longest of the three parts."),
    later(
        "Allocated, over the host's time of a step (a GPU comes later). At the peak: PyTorch {theirs} MB, fused {ours} "
        "MB."
    ),
    later("Between GPUs, which the rows above are not: there all ranks share one memory."),
    later("Darker is slower; a number is the time over the best's. Right: a point a configuration."),
    later(
        "GPT-2 small, 32 x 1024 tokens: forward, backward, AdamW, bf16 under autocast; medians, interleaved. Peak: of "
        "a step, without what the other variants keep."
    ),
    later("Kernels of a GPU. In all {before} calls before, {after} after."),
    later(
        "L2: {size} MB. Two steps: where the ring outgrows the L1 of its SM, and where it outgrows the L2 (in halves: "
        "each half of the SMs is nearer to one half of it)."
    ),
    later("Limit: which term of the model is the largest, and so what to change next."),
    later("Medians, L2 flushed, all configurations of a size interleaved."),
    later(
        "Milliseconds, the slowest rank's; 32 heads on 8, D = 128, bf16, 16384 tokens per GPU. Messages are hidden as "
        "far as a time equals the one without them."
    ),
    later("One launch; counted by hand: {bytes} bytes each way."),
    later("One statement from tile to machine code. All stages side by side: {page}."),
    later(
        "Predicted: bytes in flight over the {ns} ns that a lone program takes a round, at most a copy's rate. "
        "Occupancy is one way to have bytes in flight, independent loads are the other: 4 loads a lane lie on the line "
        "of twice the warps with one, not 4 times, for the compiler issues them two by two and waits in between (in "
        "the machine code: two LDG, their use, two LDG). Near the top loads queue, and latency grows."
    ),
    later("Rank correlation: Spearman's, 1 is the measured order. Costs: the predicted best over the measured best."),
    later(
        "Roofs of this machine: {flops} TFLOP/s, {bytes} TB/s. Attention's FLOPs are not halved for causal, so it may "
        "stand at twice its place; of what is made of several kernels (the loss) only what goes in and comes out is "
        "counted. Past 100%: L2 still held what the operator before had written."
    ),
    later(
        "Roofs of this machine: {flops} TFLOP/s, {bytes} TB/s. Of PyTorch's attention masked FLOPs are counted too, so "
        "it may stand at twice its place; of what is made of several kernels (the loss) only what goes in and comes "
        "out is counted. Past 100%: L2 still held what the operator before had written."
    ),
    later("Scatter of the committed rows: {scatter}%, the largest tenth of them. For 1% at two deviations: {repeats}."),
    later("Shares of a step; of the parts of the model, their forward alone."),
    later(
        "The course's fastest runs at {least} to {most} times the best peer, which is {peers}. Not timed here: "
        "{absent}."
    ),
    later(
        "Times of a GPU. Matmuls have {flops}% of the FLOPs and {time}% of the time. MB: each tensor once. What waits "
        "for memory, whose roof comes from MB, gains from fusion and from smaller dtypes: lesson 18."
    ),
    later("The same commands work everywhere; only the lane differs."),
    later("With S grow {which}: they keep scores in memory. The others keep O and a number or two a row."),
    later("ln {words} = {loss} is the loss of a guess."),
)
PHRASES = (*NAMES, *HEADS, *SHOWN.values(), *CELLS, *WORDS, *NOTES)


def head(column: str) -> str:
    """A column's head in the reader's language."""
    return told(SHOWN.get(column, column))


def told(text: str) -> str:
    """A text of a stored table in the reader's language."""
    if "\n\n" in text:
        return "\n\n".join(map(told, text.split("\n\n")))
    if picture := re.fullmatch(r"!\[(.*)\](\(\S+\))", text):
        return f"![{told(picture[1])}]{picture[2]}"
    bold = text.startswith("**") and text.endswith("**") and len(text) > 4
    return f"**{told(text[2:-2])}**" if bold else retold(text, PHRASES, language())
