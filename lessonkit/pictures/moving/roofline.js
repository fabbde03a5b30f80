const figure = {
  model({ chip, rate, log2 }, { chips }) {
    const c = chips[chip], intensity = 2 ** log2, top = c.flops[rate] || c.flops.fp32, slope = intensity * c.bandwidth;
    return { flops: Math.min(slope, top), bound: top < slope ? "compute" : "memory", ridge: top / c.bandwidth };
  },
  draw(pen, m, { chip, rate, log2 }, { chips }, words) {
    const c = chips[chip], top = c.flops[rate] || c.flops.fp32;
    const x = (i) => 40 + ((i + 4) / 16) * 296, y = (flops) => 190 - ((Math.log10(flops) - 11) / 5.2) * 170;
    const ridge = Math.log2(m.ridge);
    pen.line(40, 190, 336, 190);
    pen.line(40, 20, 40, 190);
    pen.line(x(-4), y(2 ** -4 * c.bandwidth), x(ridge), y(top));
    pen.line(x(ridge), y(top), x(12), y(top));
    for (let i = -4; i <= 12; i += 4) pen.text(x(i), 199, i < 0 ? `1/${2 ** -i}` : String(2 ** i), 9, "middle");
    for (let d = 11; d <= 16; d++) pen.text(36, y(10 ** d), ["0.1", "1", "10", "100", "1000", "10k"][d - 11], 8, "end");
    pen.box(x(log2) - 4, y(m.flops) - 4, 8, 8, m.bound === "memory" ? "a" : "e");
    pen.text(350, 213, words.across, 9, "end");
    pen.text(8, 9, "TFLOP/s", 9);
  },
  shown: { log2: (log2) => (log2 < 0 ? `1/${(2 ** -log2).toPrecision(3)}` : (2 ** log2).toPrecision(3)).replace(/\.0+$/, "") },
  say: (m, p, data, words) => {
    const values = { flops: (m.flops / 1e12).toPrecision(3), ridge: m.ridge.toPrecision(3), bound: words[m.bound] };
    return fill(words.said, values);
  },
};
