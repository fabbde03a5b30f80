const figure = {
  model({ pad, swizzle, column }, { tile, lanes, banks }) {
    const hit = [], counts = {};
    for (let lane = 0; lane < lanes; lane++) {
      const word = lane * (tile + pad) + (swizzle ? column ^ lane : column);
      hit.push(word % banks);
      counts[word % banks] = (counts[word % banks] || 0) + 1;
    }
    return { banks: hit, wavefronts: Math.max(...Object.values(counts)) };
  },
  draw(pen, m, p, { lanes, banks }, words) {
    const cell = 330 / banks, deep = 7;
    pen.text(8, 8, words.banks, 10);
    pen.box(22, 18, banks * cell, lanes * deep, "off");
    for (let lane = 0; lane < lanes; lane++) {
      pen.box(22 + m.banks[lane] * cell, 18 + lane * deep, cell, deep, "e");
      if (lane % 8 === 0) pen.text(18, 21.5 + lane * deep, String(lane), 8, "end", "faint");
    }
    pen.text(8, 28 + lanes * deep, words.lanes, 9, "start", "faint");
  },
  say: (m, p, data, words) => fill(words.said, { wavefronts: m.wavefronts }),
};
