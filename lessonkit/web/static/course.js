// What pages share: to ask the server that gave them, and to make elements.
window.course = (() => {
  "use strict";
  const token = document.querySelector('meta[name="course-token"]')?.content; // none without the course's own server
  const language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";

  // Who grades and keeps: one function from a request to its answer. It throws an Error whose message is a status.
  const ask = async (request) => {
    const answer = await fetch("/api/ask", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Course-Token": token },
      body: JSON.stringify({ language, ...request }),
    }).catch(() => { throw new Error("0"); });
    if (!answer.ok) throw new Error(String(answer.status));
    return answer.json();
  };

  const make = (tag, attributes, ...inside) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...inside);
    return node;
  };

  return { ask, language, make, token };
})();

// The pages' own small helpers: unfold all code, keep a chosen path, unfold before printing, name scrolling regions.
(() => {
  "use strict";
  const zh = document.documentElement.lang.startsWith("zh");
  const say = (en, chinese) => (zh ? chinese : en);
  // A page from a file may not read the pages that a search finds, so it shows their titles alone.
  if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
  const article = document.querySelector("article");
  if (!article) return;
  const folds = [...article.querySelectorAll("details.fold.code")];

  const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* a page from a file may have none */ } };
  const kept = (key) => { try { return localStorage.getItem(key); } catch { return null; } };

  if (folds.length > 1) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "fold-all";
    const show = (open) => {
      button.setAttribute("aria-pressed", String(open));
      button.textContent = open ? say("Fold all code", "折叠所有代码") : say("Unfold all code", "展开所有代码");
    };
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-pressed") !== "true";
      folds.forEach((fold) => { fold.open = open; });
      keep("course-code", open ? "open" : "");
      show(open);
    });
    const open = kept("course-code") === "open";
    if (open) folds.forEach((fold) => { fold.open = true; });
    show(open);
    folds[0].before(button);
  }

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...article.querySelectorAll("details:not([open])")];
    closed.forEach((fold) => { fold.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((fold) => { fold.open = false; }));

  // A drawing in text is made smaller until it fits, as long as it can be read. Then it scrolls.
  const LEGIBLE = 9.5; // pixels
  const fit = (part) => {
    const drawings = [...part.querySelectorAll(".highlight-text pre")];
    drawings.forEach((pre) => { pre.style.fontSize = ""; });
    const sizes = drawings.map((pre) => {
      const style = getComputedStyle(pre), edges = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
      const share = pre.clientWidth > edges ? (pre.clientWidth - edges) / (pre.scrollWidth - edges) : 1; // 1 in a fold
      return share < 1 ? Math.max(LEGIBLE, parseFloat(style.fontSize) * share) : 0;
    });
    drawings.forEach((pre, i) => { if (sizes[i]) pre.style.fontSize = `${sizes[i]}px`; });
  };
  fit(article);
  addEventListener("resize", () => fit(article));
  article.addEventListener("toggle", (event) => fit(event.target), true); // what stands in a fold has no width before it is open

  // What scrolls sideways is reached by the keyboard.
  for (const region of article.querySelectorAll("div.highlight pre, .table-wrapper, .chart-scroll")) region.tabIndex = 0;

  // Previous and next by the path that a reader has chosen.
  const root = document.documentElement.dataset.content_root || "./";
  const up = new URL(root, location.href).href;
  const here = decodeURIComponent(location.href.split(/[?#]/)[0].slice(up.length)).replace(/\.html$/, "");
  const routes = Object.entries(window.COURSE_PATHS || {}).filter(([, path]) => path.pages.includes(here));
  if (routes.length) {
    const nav = document.createElement("nav");
    nav.className = "path-nav";
    nav.setAttribute("aria-label", say("By path", "按路线"));
    const label = document.createElement("label");
    label.append(say("Path: ", "路线："));
    const menu = document.createElement("select");
    for (const [name, path] of routes) menu.append(new Option(path.title[zh ? "zh" : "en"], name));
    const chosen = kept("course-path");
    menu.value = routes.some(([name]) => name === chosen) ? chosen : routes[routes.length - 1][0];
    label.append(menu);
    const links = document.createElement("span");
    const draw = () => {
      const pages = window.COURSE_PATHS[menu.value].pages;
      const at = pages.indexOf(here);
      links.replaceChildren();
      for (const [page, words] of [[pages[at - 1], say("← previous", "← 上一课")], [pages[at + 1], say("next →", "下一课 →")]]) {
        if (!page) continue;
        const link = document.createElement("a");
        link.href = up + page + ".html";
        link.textContent = words;
        links.append(link, " ");
      }
      links.append(`${at + 1} / ${pages.length}`);
    };
    menu.addEventListener("change", () => { keep("course-path", menu.value); draw(); });
    draw();
    nav.append(label, links);
    article.after(nav);
  }
})();
