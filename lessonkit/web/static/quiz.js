// A quiz in its page: each answer is marked once, by what the page was made with. Where the course's own server gave
// the page, the whole sitting is kept with the terminal's; it marks anew.
(() => {
  "use strict";
  const quiz = document.querySelector(".quiz");
  if (!quiz) return;
  const { ask, make, token } = window.course;
  const words = JSON.parse(quiz.dataset.words), after = quiz.dataset.part === "after";
  const questions = [...quiz.querySelectorAll(".quiz-question")];
  const result = quiz.querySelector(".quiz-result");
  const given = questions.map(() => null); // [what was answered, whether it is right]

  const say = (place, kind, ...inside) => place.append(make("p", { class: `quiz-${kind}` }, ...inside));
  const filled = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

  // As lessonkit/exercise/quiz.py marks it.
  const mark = ({ right, within, wrong }, answer) => {
    if (within === undefined) return [answer === right, wrong.find(([value]) => value === answer)?.[1] ?? ""];
    const value = Number(answer), close = (exact) => Math.abs(value - exact) <= within * Math.abs(exact);
    return [close(right), wrong.find(([exact]) => close(exact))?.[1] ?? ""];
  };

  const opened = token && ask({ do: "quiz", quiz: quiz.dataset.quiz, part: quiz.dataset.part })
    .then((answer) => { if (answer.day && !given.some(Boolean)) result.textContent = filled(words.taken, answer); })
    .catch(() => {});

  const keep = async () => {
    const right = given.filter(([, is]) => is).length;
    result.textContent = filled(words.result, { right, count: given.length });
    if (!token) {
      result.append(` ${words.alone}`);
      return;
    }
    const request = { do: "quiz", quiz: quiz.dataset.quiz, part: quiz.dataset.part, answers: given.map(([answer]) => answer) };
    await opened; // the server answers one request at a time
    try {
      const answer = await ask(request);
      if (answer.error) throw new Error(answer.error);
      result.append(` ${filled(words.kept, answer)}${answer.again ? ` ${words.again}` : ""}`);
    } catch (error) {
      result.append(` ${words.status[error.message] || error.message}`);
    }
  };

  questions.forEach((question, nth) => {
    const marks = JSON.parse(question.dataset.marks);
    const button = question.querySelector(".quiz-check"), said = question.querySelector(".quiz-said");
    const fold = question.querySelector(".quiz-answer");
    said.tabIndex = -1;
    const field = question.querySelector("input[type=text]"), choices = [...question.querySelectorAll("input[type=radio]")];
    const check = () => {
      if (given[nth]) return;
      const answer = field ? field.value.trim().replace(/[,_]/g, "") : choices.find((each) => each.checked)?.value;
      said.replaceChildren();
      if (!answer || (field && !Number.isFinite(Number(answer)))) {
        say(said, "first", field ? words.number : words.choose);
        (field || choices[0]).focus();
        return;
      }
      const [right, why] = mark(marks, answer);
      given[nth] = [answer, right];
      say(said, right ? "right" : "wrong", right ? words.right : words.wrong);
      if (after && !right && why) say(said, "why", why);
      if (after) fold.open = true;
      for (const each of [field, ...choices]) if (each) each.disabled = true;
      choices.find((each) => each.checked)?.closest("label").classList.add(right ? "quiz-is-right" : "quiz-is-wrong");
      if (after) choices.find((each) => each.value === marks.right)?.closest("label").classList.add("quiz-is-right");
      button.hidden = true;
      said.focus(); // its button is gone
      if (given.every(Boolean)) keep();
    };
    button.hidden = false;
    button.addEventListener("click", check);
    field?.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); check(); } });
  });

})();
