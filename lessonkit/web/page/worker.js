// Python in a page, beside it: loads Pyodide, NumPy and the course's grader, then answers requests one after another.
"use strict";
importScripts("pyodide.js");
const here = new URL(".", self.location).href;

const ready = (async () => {
  const python = await loadPyodide({ indexURL: here });
  const [course] = await Promise.all([
    fetch(`${here}course.zip`).then((found) => found.arrayBuffer()),
    python.loadPackage(`${here}NUMPY`, { messageCallback: () => {}, checkIntegrity: false }),
  ]);
  python.FS.writeFile("/course.zip", new Uint8Array(course));
  python.runPython(`
import sys, zipfile
zipfile.ZipFile("/course.zip").extractall("/course")
sys.path.insert(0, "/course")
import boot
boot.begin()`);
  return python.globals.get("boot").answer;
})();
ready.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error) }));

addEventListener("message", async ({ data }) => {
  const answer = await ready;
  postMessage(JSON.parse(answer(JSON.stringify(data.request), JSON.stringify(data.kept))));
});
