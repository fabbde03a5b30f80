const figure = {
  plan(order, blocks) {
    const plan = [];
    if (order === "serial") {
      for (let block = 0; block < blocks; block++) for (const what of "QSP") plan.push([what, block]);
      return plan;
    }
    plan.push(["Q", 0], ["S", 0]);
    for (let block = 1; block < blocks; block++) plan.push(["Q", block], ["P", block - 1], ["S", block]);
    plan.push(["P", blocks - 1]);
    return plan;
  },
  model(p, data) {
    const { matmul, exps, others, load } = data.cycles[p.D], { stages, order } = p, blocks = data.blocks;
    const spans = { loads: [], tensor: [], softmax0: [], softmax1: [] }, plan = figure.plan(order, blocks);
    const place = [0, 0], ready = [0, 0], scores = [[], []], weights = [[], []];
    const arrived = { Q: [], P: [] }, released = { Q: [[], []], P: [[], []] };
    let l2 = 0, tensor = 0, mufu = 0, turn = 0;
    while (Math.min(...place) < plan.length) {
      while (arrived.P.length < blocks) {
        const what = arrived.Q.length === arrived.P.length ? "Q" : "P", block = arrived[what].length, [a, b] = released[what];
        if (block >= stages && Math.min(a.length, b.length) <= block - stages) break;
        const begin = block >= stages ? Math.max(l2, a[block - stages], b[block - stages]) : l2;
        l2 = begin + load;
        arrived[what].push(l2);
        spans.loads.push({ start: begin, length: load, what: "QP".indexOf(what), block });
      }
      let start = Infinity, c = 0;
      for (const each of [0, 1]) {
        const [what, block] = plan[place[each]] || ["", 0];
        let at = Infinity;
        if (what === "S") at = Math.max(scores[each][block], ready[each]);
        else if (what && block < arrived[what].length && (order !== "ping-pong" || turn === each))
          at = Math.max(ready[each], arrived[what][block], what === "P" ? weights[each][block] : 0, tensor);
        if (at < start) [start, c] = [at, each];
      }
      const [what, block] = plan[place[c]++];
      if (what === "S") {
        mufu = Math.max(start, mufu) + exps;
        weights[c][block] = ready[c] = mufu + others;
        spans["softmax" + c].push({ start, length: ready[c] - start, what: 0, block });
        continue;
      }
      tensor = start + matmul;
      released[what][c].push(tensor);
      if (what === "Q") scores[c][block] = tensor;
      if (order === "serial") ready[c] = tensor;
      if (what === "P" || block === 0) turn = 1 - c;
      spans.tensor.push({ start, length: matmul, what: "QP".indexOf(what), consumer: c, block });
    }
    const mine = spans.tensor.filter((s) => s.consumer === 0 && s.what === 1).map((s) => s.start);
    const half = Math.floor(blocks / 2), cycles = (mine[mine.length - 2] - mine[half]) / (blocks - 2 - half);
    const total = Math.max(...spans.tensor.map((s) => s.start + s.length));
    return { spans, total, cycles, percent: (100 * 4 * matmul) / cycles };
  },
  draw(pen, m, p, data, words) {
    const scale = 280 / m.total, lanes = ["loads", "tensor", "softmax0", "softmax1"];
    lanes.forEach((name, i) => {
      const y = 10 + i * 28;
      pen.text(4, y + 10, words[name], 9);
      for (const s of m.spans[name]) {
        const kind = name === "loads" ? "off" : name === "tensor" ? "ab"[s.consumer] : name === "softmax0" ? "a" : "b";
        const label = name === "tensor" ? ["QK", "PV"][s.what] : name === "loads" ? "KV"[s.what] : "";
        pen.box(74 + s.start * scale, y, s.length * scale, 20, kind, s.length * scale > 14 ? label : "", 8);
      }
    });
    pen.legend(126, [["a", words.first], ["b", words.second]]);
  },
  say: (m, p, data, words) => fill(words.said, { cycles: m.cycles.toFixed(0), percent: m.percent.toFixed(0) }),
};
