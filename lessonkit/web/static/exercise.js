// An exercise in its page: an editor, check, hint, reset and the grader's words, where the course's own server gave the
// page, or where the page can load Python. Elsewhere the page keeps the commands for the terminal.
(() => {
  "use strict";
  const { language, make, token } = window.course;
  const python = (place) => place.dataset.python && location.protocol !== "file:"
    ? window.coursePython(place.dataset.python, JSON.parse(place.dataset.words).limit) : null;

  // ---- The list of a folder's exercises: which have passed ----
  const list = document.querySelector(".exercise-list");
  if (list && (token || python(list))) {
    const words = JSON.parse(list.dataset.words);
    const asked = token ? window.course.ask({ do: "list" }) : Promise.resolve({ passed: python(list).passed() });
    asked.then(({ passed }) => {
      for (const link of list.querySelectorAll("a")) {
        const stem = link.getAttribute("href").split("/").pop().replace(/\.html.*/, "");
        const day = passed[`${list.dataset.folder}.${stem}`];
        if (day) link.after(" ", make("span", { class: "exercise-passed" }, `✓ ${words.passed.replace("{day}", day)}`));
      }
    }).catch(() => {});
  }

  // ---- One exercise ----
  const place = document.querySelector(".exercise");
  const here = place && !token && python(place);
  if (!place || !(token || here)) return;
  const ask = token ? window.course.ask : (request) => here.ask({ language, ...request });
  const words = JSON.parse(place.dataset.words), exercise = place.dataset.exercise;
  const indent = "    ";
  let seen = null, busy = false;

  const numbers = make("pre", { class: "exercise-numbers", "aria-hidden": "true" });
  const text = make("textarea", {
    id: "exercise-text", spellcheck: "false", autocapitalize: "off", autocomplete: "off", autocorrect: "off", wrap: "off",
    "aria-label": words.editor, "aria-describedby": "exercise-keys",
  });
  const button = (label) => make("button", { type: "button" }, label);
  const check = button(words.check), hint = button(words.hint), reset = button(words.reset);
  const state = make("p", { class: "exercise-state" });
  const waiting = make("p", { class: "exercise-wait", role: "status" });
  const hints = make("ul", { class: "exercise-hints" });
  const said = make("div", { class: "exercise-said", role: "status" });
  const solved = make("div", {});
  const keys = make("p", { class: "exercise-keys", id: "exercise-keys" }, words.keys);
  const unfold = () => {
    place.replaceChildren(
      make("div", { class: "exercise-editor" }, numbers, text), keys,
      make("div", { class: "exercise-buttons" }, check, hint, reset), waiting, said, hints, solved, state,
    );
    document.querySelector(".exercise-terminal").hidden = true;
  };

  const lines = () => {
    const count = text.value.split("\n").length;
    text.rows = Math.max(count, 8);
    numbers.textContent = Array.from({ length: count }, (_, n) => n + 1).join("\n");
  };
  const show = (answer) => {
    text.value = seen = answer;
    lines();
  };
  // As if typed, so that the browser's undo takes it back.
  const type = (from, to, what) => {
    text.setSelectionRange(from, to);
    if (!document.execCommand(what ? "insertText" : "delete", false, what)) text.setRangeText(what, from, to, "end");
    lines();
  };

  let leaves = false; // Escape, then Tab, leaves the editor
  text.addEventListener("keydown", (event) => {
    const { selectionStart: from, selectionEnd: to, value } = text;
    const start = value.lastIndexOf("\n", from - 1) + 1;
    if (event.key === "Escape") {
      leaves = true;
      return;
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      check.click();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      const before = value.slice(start, from);
      type(from, to, "\n" + before.match(/^\s*/)[0] + (/[:{(\[]\s*$/.test(before) ? indent : ""));
    } else if (event.key === "Tab" && !leaves) {
      event.preventDefault();
      const several = value.slice(from, to).includes("\n");
      if (!several && !event.shiftKey) type(from, to, indent);
      else {
        const block = value.slice(start, to);
        const moved = event.shiftKey ? block.replace(/^ {1,4}/gm, "") : block.replace(/^(?=.)/gm, indent);
        type(start, to, moved);
        text.setSelectionRange(several ? start : Math.max(start, from + moved.length - block.length), start + moved.length);
      }
    }
    leaves = false;
  });
  text.addEventListener("input", lines);
  addEventListener("beforeunload", (event) => { if (seen !== null && text.value !== seen) event.preventDefault(); });

  const note = (kind, ...inside) => make("p", { class: `exercise-${kind}` }, ...inside);
  const known = (answer) => {
    state.textContent = [
      here ? words.browser : words.file.replace("{file}", answer.file), words.checks.replace("{count}", answer.checks),
      answer.passed ? `✓ ${words.passed.replace("{day}", answer.passed)}` : "",
    ].filter(Boolean).join(" · ");
    hints.replaceChildren(...answer.hints.map((each) => make("li", {}, each)));
    solved.replaceChildren();
    if (answer.solution) {
      const code = make("pre", { tabindex: "0" }, make("code", {}, answer.solution));
      solved.append(make("details", { class: "fold" }, make("summary", {}, words.solution), code));
    }
  };

  // Ask, and show what every answer has. `what` is said meanwhile.
  const request = async (fields, what) => {
    if (busy) return null;
    busy = true;
    place.setAttribute("aria-busy", "true");
    waiting.textContent = what;
    let answer = null;
    try {
      answer = await ask({ exercise, ...fields });
      if (answer.error) throw new Error(answer.error);
      if (answer.hints) known(answer);
      waiting.textContent = "";
    } catch (error) {
      waiting.textContent = words.status[error.message] || error.message;
      answer = null;
    }
    busy = false;
    place.removeAttribute("aria-busy");
    return answer;
  };

  const open = async () => {
    const answer = await request({ do: "open" }, words.loading);
    if (!answer) return;
    unfold();
    show(answer.answer);
  };
  check.addEventListener("click", async () => {
    if (seen === null) return;
    const sent = text.value;
    said.replaceChildren();
    const answer = await request({ do: "check", answer: sent, seen }, words.checking);
    if (!answer) return;
    if (answer.changed !== undefined) {
      const take = button(words.take), keep = button(words.keep);
      take.addEventListener("click", () => { show(answer.changed); said.replaceChildren(); });
      keep.addEventListener("click", () => { seen = answer.changed; check.click(); });
      said.append(note("refused", words.changed), make("p", { class: "exercise-buttons" }, take, keep));
      return;
    }
    seen = sent;
    for (const [kind, line] of answer.lines) said.append(note(kind, line));
    if (answer.printed) said.append(note("means", words.printed), make("pre", { tabindex: "0" }, answer.printed));
  });
  hint.addEventListener("click", () => request({ do: "hint" }, words.loading));
  reset.addEventListener("click", async () => {
    if (!confirm(words.surely)) return;
    const answer = await request({ do: "reset" }, words.loading);
    said.replaceChildren();
    if (answer) show(answer.answer);
  });
  if (token) {
    // Back from another editor: what it has saved is shown, unless something was written here.
    addEventListener("focus", () => { if (seen !== null && text.value === seen) open(); });
    unfold();
    open();
    return;
  }
  // Python is megabytes: it is loaded when the learner asks for it.
  const load = button(words.load);
  place.replaceChildren(make("p", { class: "exercise-buttons" }, load), waiting);
  load.addEventListener("click", () => {
    load.disabled = true;
    open().finally(() => { load.disabled = false; });
  });
})();
