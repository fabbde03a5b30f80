// The race of the start page: one ladder at a time, chosen from a list, and a button that starts it anew.
(() => {
  "use strict";
  const race = document.querySelector(".race");
  if (!race) return;
  const { make } = window.course;
  const words = JSON.parse(race.dataset.words), ladders = [...race.querySelectorAll(".race-ladder")];
  const menu = make("select", { "aria-label": words.ladder });
  for (const [nth, ladder] of ladders.entries()) menu.append(new Option(ladder.dataset.title, String(nth)));
  const run = () => {
    ladders.forEach((ladder, nth) => { ladder.hidden = String(nth) !== menu.value; });
    race.classList.remove("race-runs");
    void race.offsetWidth; // ends the animation, so that it can begin
    race.classList.add("race-runs");
  };
  const again = make("button", { type: "button" }, words.again);
  again.addEventListener("click", run);
  menu.addEventListener("change", run);
  race.querySelector("figcaption").after(make("p", { class: "race-controls" }, menu, again));
  run();
})();
