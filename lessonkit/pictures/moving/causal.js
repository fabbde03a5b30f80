const figure = {
  model({ queries, keys, rows, columns }) {
    const found = [];
    for (let top = 0; top < queries; top += rows) {
      const line = [];
      for (let left = 0; left < keys; left += columns) {
        const first = Math.min(top, queries - 1) + keys - queries, last = Math.min(top + rows, queries) - 1 + keys - queries;
        const right = Math.min(left + columns, keys) - 1;
        line.push(left > last ? "skipped" : right <= first ? "whole" : "masked");
      }
      found.push(line);
    }
    return found;
  },
  draw(pen, blocks, { queries, keys, rows, columns }, data, words) {
    const unit = Math.min(330 / keys, 300 / queries), kinds = { whole: "c", masked: "b", skipped: "none" };
    blocks.forEach((line, r) =>
      line.forEach((what, k) => {
        const wide = Math.min(columns, keys - k * columns), tall = Math.min(rows, queries - r * rows);
        pen.box(20 + k * columns * unit, 20 + r * rows * unit, wide * unit - 1, tall * unit - 1, kinds[what]);
      }),
    );
    pen.text(20, 10, words.keys, 9);
    pen.legend(30 + queries * unit, [["c", words.whole], ["b", words.masked], ["none", words.skipped]]);
  },
  say: (blocks, p, data, words) => {
    const all = blocks.flat(), count = (kind) => all.filter((each) => each === kind).length;
    return fill(words.said, { whole: count("whole"), masked: count("masked"), skipped: count("skipped") });
  },
};
