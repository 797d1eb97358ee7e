// Minimisation of smooth functions: L-BFGS with a line search by bisection (weak Wolfe conditions).
corn.minimise = (() => {
  "use strict";
  const { dot } = corn.matrices;
  const MEMORY = 50;

  /** Return the last point. `fun` maps a point to {value, gradient}. */
  function minimise(fun, start, maxIterations) {
    let x = start;
    let { value, gradient } = fun(x);
    const pairs = [];
    for (let iteration = 0; iteration < maxIterations; iteration++) {
      let direction = descend(gradient, pairs);
      let slope = dot(direction, gradient);
      if (!(slope < 0)) {
        pairs.length = 0;
        direction = gradient.map((g) => -g);
        slope = -dot(gradient, gradient);
      }
      const first = pairs.length ? 1 : Math.min(1, 1 / Math.sqrt(-slope));
      const found = search(fun, x, value, direction, slope, first);
      if (!found) return x;
      const s = found.x.map((entry, k) => entry - x[k]);
      const y = found.gradient.map((entry, k) => entry - gradient[k]);
      const curvature = dot(s, y);
      if (curvature > 1e-16 * dot(y, y)) pairs.push({ s, y, curvature });
      if (pairs.length > MEMORY) pairs.shift();
      ({ x, value, gradient } = found);
    }
    return x;
  }

  /** Return minus the inverse Hessian of the last steps times the gradient. */
  function descend(gradient, pairs) {
    const q = gradient.map((g) => -g);
    const shares = [];
    for (let k = pairs.length - 1; k >= 0; k--) {
      const { s, y, curvature } = pairs[k];
      shares[k] = dot(s, q) / curvature;
      for (let i = 0; i < q.length; i++) q[i] -= shares[k] * y[i];
    }
    if (pairs.length) {
      const { y, curvature } = pairs[pairs.length - 1];
      const scale = curvature / dot(y, y);
      for (let i = 0; i < q.length; i++) q[i] *= scale;
    }
    pairs.forEach(({ s, y, curvature }, k) => {
      const correction = shares[k] - dot(y, q) / curvature;
      for (let i = 0; i < q.length; i++) q[i] += correction * s[i];
    });
    return q;
  }

  function search(fun, x, value, direction, slope, first) {
    let [low, high, step] = [0, Infinity, first];
    for (let k = 0; k < 30; k++) {
      const trial = x.map((entry, i) => entry + step * direction[i]);
      const found = fun(trial);
      if (!(found.value <= value + 1e-4 * step * slope)) high = step;
      else if (dot(found.gradient, direction) < 0.9 * slope) low = step;
      else return { x: trial, ...found };
      step = high === Infinity ? 2 * low : (low + high) / 2;
    }
    return null;
  }

  return minimise;
})();
