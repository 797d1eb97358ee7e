// Pictures of the page: the graph with each agent's epsilon, costs on a logarithmic axis, and the
// hundred cases of which an attacker catches some.
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
    if (value === null || value === undefined) return "";
    if (!isFinite(value)) return "∞";
    if (value === 0) return "0";
    const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
    const rounded = Math.ceil(value / unit - 1e-4) * unit;
    return rounded >= 1e4 ? rounded.toExponential(1) : String(Number(rounded.toPrecision(3)));
  }

  /** Return a blue for shares of the promise up to 1, and vermilion beyond. */
  function colourOf(share) {
    if (share > 1.005) return "#D55E00";
    const mix = (from, to) => Math.round(from + (to - from) * Math.min(Math.max(share, 0), 1));
    return `rgb(${mix(255, 86)}, ${mix(255, 180)}, ${mix(255, 233)})`;
  }

  /**
   * Draw links and agents. `act(agent)` is called for a click, Enter or Space; `drop(agent, place)`
   * after a drag.
   */
  function drawGraph(svg, { places, links, insiders, selected, epsilons, promised, act, drop }) {
    const n = places.length;
    const radius = n <= 12 ? 4.6 : n <= 24 ? 3.8 : 3;
    const focused = document.activeElement?.dataset?.agent;
    const lines = links.map(([i, j]) => {
      const isKnown = insiders.has(i) || insiders.has(j);
      const [[x1, y1], [x2, y2]] = [places[i], places[j]];
      return make("line", { x1, y1, x2, y2, class: isKnown ? "link known" : "link" });
    });
    const agents = places.map((place, agent) => {
      const node = drawAgent(agent, radius, {
        isInsider: insiders.has(agent),
        isSelected: selected === agent,
        epsilon: epsilons?.[agent],
        promised,
      });
      node.setAttribute("transform", `translate(${place[0]} ${place[1]})`);
      listen(svg, node, agent, act, drop);
      return node;
    });
    svg.replaceChildren(make("g", {}, ...lines), make("g", {}, ...agents));
    // Redrawing must not take the focus away from the keyboard.
    if (focused !== undefined) svg.querySelector(`[data-agent="${focused}"]`)?.focus();
  }

  function drawAgent(agent, radius, { isInsider, isSelected, epsilon, promised }) {
    const share = epsilon === null || epsilon === undefined ? null : epsilon / promised;
    const isExposed = share !== null && share > 1.005;
    const text = isInsider
      ? `agent ${agent}, curious insider`
      : `agent ${agent}, ε = ${formatEpsilon(epsilon) || "not computed yet"}` +
        (isExposed ? ", above the promise" : "");
    const node = make("g", {
      class: `agent${isSelected ? " selected" : ""}`,
      role: "button",
      tabindex: "0",
      "data-agent": agent,
      "aria-pressed": String(isInsider),
      "aria-label": text,
    });
    const size = 2 * radius;
    node.append(make("title", {}, text));
    if (isInsider) {
      // A square, so that shape and not only colour tells insiders from others.
      const box = { x: -radius, y: -radius, width: size, height: size, rx: 0.8 };
      node.append(make("rect", { ...box, class: "insider" }));
      node.append(make("text", { class: "mark", y: 1.4 }, "✕"));
    } else {
      if (isExposed) node.append(make("circle", { r: radius + 1.1, class: "ring" }));
      const fill = share === null ? "#FFFFFF" : colourOf(share);
      node.append(make("circle", { r: radius, class: "honest", fill }));
      const label = formatEpsilon(epsilon);
      const style = `font-size:${Math.min(2.9, (3.2 * radius) / Math.max(label.length, 4))}px`;
      node.append(make("text", { class: "value", y: 1, style }, label));
    }
    node.append(make("text", { class: "name", y: radius + 3.4 }, String(agent)));
    return node;
  }

  function listen(svg, node, agent, act, drop) {
    let start = null;
    const place = (event) => {
      const point = new DOMPoint(event.clientX, event.clientY);
      const { x, y } = point.matrixTransform(svg.getScreenCTM().inverse());
      return [Math.min(Math.max(x, 4), 96), Math.min(Math.max(y, 4), 94)];
    };
    node.addEventListener("pointerdown", (event) => {
      start = [event.clientX, event.clientY];
      node.setPointerCapture(event.pointerId);
    });
    node.addEventListener("pointerup", (event) => {
      if (!start) return;
      const moved = Math.hypot(event.clientX - start[0], event.clientY - start[1]);
      start = null;
      if (moved < 6) act(agent);
      else drop(agent, place(event));
    });
    node.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act(agent);
    });
  }

  /** Draw one dot for each row {label, remark, value, kind} on a logarithmic axis from 1. */
  function drawCosts(svg, rows, most) {
    const height = 8 + 27 * rows.length;
    const [left, right] = [10, 250];
    const end = Math.max(most, 2);
    const place = (value) => left + ((right - left) * Math.log(value)) / Math.log(end);
    svg.setAttribute("viewBox", `0 0 300 ${height + 14}`);
    const ticks = [1, 2, 5, 10, 20, 40].filter((tick) => tick <= end * 1.001);
    const nodes = ticks.flatMap((tick) => [
      make("line", { class: "grid", x1: place(tick), x2: place(tick), y1: 4, y2: height }),
      make("text", { class: "tick", x: place(tick), y: height + 10 }, `${tick} ×`),
    ]);
    rows.forEach(({ label, remark, value, kind }, k) => {
      const y = 24 + 27 * k;
      const heading = make("text", { class: "row", x: left, y: y - 8 }, label);
      heading.append(make("tspan", { class: "remark" }, `  ${remark}`));
      nodes.push(heading);
      if (value === null) {
        nodes.push(make("text", { class: "remark", x: left, y: y + 3 }, "computing …"));
        return;
      }
      const at = place(Math.max(value, 1));
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

  return { drawCases, drawCosts, drawGraph, formatEpsilon };
})();
