// Pictures of the page: the agents, costs on a logarithmic axis, and the hundred cases of which an
// attacker catches some.
corn.drawing = (() => {
  "use strict";
  const SPACE = "http://www.w3.org/2000/svg";

  function make(name, attributes = {}, ...children) {
    const node = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  /** Return three digits, rounded up, because an epsilon must not look smaller than it is. */
  function formatEpsilon(value) {
    if (!isFinite(value)) return "∞";
    if (value === 0) return "0";
    const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
    const rounded = Math.ceil(value / unit - 1e-4) * unit;
    return rounded >= 1e4 ? rounded.toExponential(1) : String(Number(rounded.toPrecision(3)));
  }

  /** Draw one shape for each agent: squares for insiders, a ring where the promise is broken. */
  function drawAgents(svg, { agents, insiders, isBroken }) {
    const columns = Math.ceil(Math.sqrt(2.5 * agents));
    const cell = 100 / columns;
    svg.setAttribute("viewBox", `0 0 100 ${cell * Math.ceil(agents / columns)}`);
    const nodes = Array.from({ length: agents }, (_, k) => {
      const [x, y] = [(k % columns) * cell, Math.floor(k / columns) * cell];
      if (k < insiders) {
        const side = 0.7 * cell;
        const place = { x: x + 0.15 * cell, y: y + 0.15 * cell };
        return make("rect", { ...place, width: side, height: side, class: "insider" });
      }
      const circle = { cx: x + cell / 2, cy: y + cell / 2, r: 0.33 * cell };
      return make("circle", { ...circle, class: isBroken ? "beyond" : "within" });
    });
    svg.replaceChildren(...nodes);
  }

  /** Draw one dot for each row {label, remark, value, kind} on a logarithmic axis from 1. */
  function drawCosts(svg, rows, most) {
    const height = 8 + 27 * rows.length;
    const [left, right] = [10, 250];
    const end = Math.max(most, 2);
    const place = (value) => left + ((right - left) * Math.log(value)) / Math.log(end);
    svg.setAttribute("viewBox", `0 0 300 ${height + 14}`);
    const ticks = (end <= 50 ? [1, 2, 5, 10, 20, 50] : [1, 10, 100, 1000]).filter((tick) => tick <= end);
    const nodes = ticks.flatMap((tick) => [
      make("line", { class: "grid", x1: place(tick), x2: place(tick), y1: 4, y2: height }),
      make("text", { class: "tick", x: place(tick), y: height + 10 }, `${tick} ×`),
    ]);
    rows.forEach(({ label, remark, value, kind }, k) => {
      const y = 24 + 27 * k;
      const at = place(value);
      const heading = make("text", { class: "row", x: left, y: y - 8 }, label);
      heading.append(make("tspan", { class: "remark" }, `  ${remark}`));
      nodes.push(heading);
      nodes.push(make("line", { class: `bar ${kind}`, x1: left, x2: at, y1: y, y2: y }));
      nodes.push(make("circle", { class: `dot ${kind}`, cx: at, cy: y, r: 3.6 }));
      const text = `${value < 9.995 ? value.toFixed(2) : value.toFixed(1)} ×`;
      nodes.push(make("text", { class: "number", x: at + 7, y: y + 3.2 }, text));
    });
    svg.replaceChildren(...nodes);
  }

  /** Draw a hundred cases, of which the attacker catches the given share. */
  function drawCases(svg, share) {
    const caught = Math.round(100 * share);
    const cells = Array.from({ length: 100 }, (_, k) => {
      const [x, y] = [(k % 20) * 5, Math.floor(k / 20) * 5];
      return make("rect", { x, y, width: 4, height: 4, rx: 0.7, class: k < caught ? "caught" : "" });
    });
    svg.replaceChildren(...cells);
  }

  return { drawAgents, drawCases, drawCosts, formatEpsilon };
})();
