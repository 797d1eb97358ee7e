// Symmetric matrices as flat arrays of n * n numbers: what designs of up to 40 agents need.
corn.matrices = (() => {
  "use strict";

  /** Return ascending eigenvalues and their eigenvectors in columns, by Jacobi rotations. */
  function eigh(matrix, n) {
    const A = matrix.slice();
    const V = identity(n);
    for (let sweep = 0; sweep < 60; sweep++) {
      if (!sweepOnce(A, V, n)) break;
    }
    const order = [...Array(n).keys()].sort((a, b) => A[a * n + a] - A[b * n + b]);
    const values = Float64Array.from(order, (k) => A[k * n + k]);
    const vectors = new Float64Array(n * n);
    for (let i = 0; i < n; i++) order.forEach((k, j) => (vectors[i * n + j] = V[i * n + k]));
    return { values, vectors };
  }

  /** Rotate every pair of rows once; return whether any entry was still worth a rotation. */
  function sweepOnce(A, V, n) {
    let rotated = false;
    for (let p = 0; p < n - 1; p++) {
      for (let q = p + 1; q < n; q++) {
        const off = A[p * n + q];
        // Relative to the diagonal, so that small eigenvalues are accurate too.
        if (Math.abs(off) <= 1e-17 * Math.sqrt(Math.abs(A[p * n + p] * A[q * n + q]))) continue;
        if (Math.abs(off) < 1e-300) continue;
        rotated = true;
        const ratio = (A[q * n + q] - A[p * n + p]) / (2 * off);
        const t = Math.sign(ratio || 1) / (Math.abs(ratio) + Math.hypot(1, ratio));
        const c = 1 / Math.hypot(1, t);
        rotate(A, V, n, p, q, c, t * c);
      }
    }
    return rotated;
  }

  function rotate(A, V, n, p, q, c, s) {
    for (let k = 0; k < n; k++) {
      const x = A[k * n + p];
      const y = A[k * n + q];
      A[k * n + p] = c * x - s * y;
      A[k * n + q] = s * x + c * y;
    }
    for (let k = 0; k < n; k++) {
      const x = A[p * n + k];
      const y = A[q * n + k];
      A[p * n + k] = c * x - s * y;
      A[q * n + k] = s * x + c * y;
      const u = V[k * n + p];
      const w = V[k * n + q];
      V[k * n + p] = c * u - s * w;
      V[k * n + q] = s * u + c * w;
    }
    A[p * n + q] = A[q * n + p] = 0;
  }

  function identity(n) {
    const I = new Float64Array(n * n);
    for (let i = 0; i < n; i++) I[i * n + i] = 1;
    return I;
  }

  /** Return the inverse of a positive definite matrix, or null where Cholesky fails. */
  function invert(matrix, n) {
    const L = matrix.slice();
    for (let j = 0; j < n; j++) {
      let pivot = L[j * n + j];
      for (let k = 0; k < j; k++) pivot -= L[j * n + k] ** 2;
      if (!(pivot > 4e-16 * n * matrix[j * n + j])) return null;
      L[j * n + j] = pivot = Math.sqrt(pivot);
      for (let i = j + 1; i < n; i++) {
        let sum = L[i * n + j];
        for (let k = 0; k < j; k++) sum -= L[i * n + k] * L[j * n + k];
        L[i * n + j] = sum / pivot;
      }
    }
    return invertFromFactor(L, n);
  }

  function invertFromFactor(L, n) {
    // The inverse of L in place, below the diagonal and on it.
    for (let j = 0; j < n; j++) {
      L[j * n + j] = 1 / L[j * n + j];
      for (let i = j + 1; i < n; i++) {
        let sum = 0;
        for (let k = j; k < i; k++) sum += L[i * n + k] * L[k * n + j];
        L[i * n + j] = -sum / L[i * n + i];
      }
    }
    const Y = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j <= i; j++) {
        let sum = 0;
        for (let k = i; k < n; k++) sum += L[k * n + i] * L[k * n + j];
        Y[i * n + j] = Y[j * n + i] = sum;
      }
    }
    return Y;
  }

  /** Return V diag(values) V^T. */
  function rebuild(vectors, values, n) {
    const A = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j <= i; j++) {
        let sum = 0;
        for (let k = 0; k < n; k++) sum += vectors[i * n + k] * values[k] * vectors[j * n + k];
        A[i * n + j] = A[j * n + i] = sum;
      }
    }
    return A;
  }

  /** Solve A x = b for a positive definite A, by its inverse; null where Cholesky fails. */
  function solve(A, b, n) {
    const Y = invert(A, n);
    return Y && Float64Array.from({ length: n }, (_, i) => dot(Y.subarray(i * n, i * n + n), b));
  }

  function dot(a, b) {
    let sum = 0;
    for (let k = 0; k < a.length; k++) sum += a[k] * b[k];
    return sum;
  }

  function diagonal(A, n) {
    return Float64Array.from({ length: n }, (_, i) => A[i * n + i]);
  }

  return { diagonal, dot, eigh, identity, invert, rebuild, solve };
})();
