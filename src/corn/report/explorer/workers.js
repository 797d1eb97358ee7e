// Workers made from the page's own scripts: the page needs no other file and no server.
corn.workers = (() => {
  "use strict";

  /** The fate of a task that a newer one replaced. */
  class AbandonedError extends Error {}

  /** A worker that runs one task at a time, and abandons it when a newer one arrives. */
  class TaskRunner {
    constructor(source) {
      this.source = source;
      this.id = 0;
      this.worker = null;
      this.abandon = null;
    }

    /** Return the result of a task; a task that is still running is abandoned. */
    run(name, settings, watch = () => {}) {
      const id = ++this.id;
      if (this.abandon) this.stop();
      this.worker ??= this.start();
      return new Promise((resolve, reject) => {
        this.abandon = () => reject(new AbandonedError());
        this.worker.onerror = (event) => reject(new Error(event.message));
        this.worker.onmessage = ({ data }) => {
          if (data.id !== id) return;
          if (!("result" in data)) return watch(data.evaluations, data.gap);
          this.abandon = null;
          resolve(data.result);
        };
        this.worker.postMessage({ id, name, settings });
      });
    }

    start() {
      const script = `globalThis.corn = {};\n${this.source}\ncorn.tasks.answerMessages();`;
      const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
      const worker = new Worker(address);
      URL.revokeObjectURL(address);
      return worker;
    }

    stop() {
      this.worker?.terminate();
      this.worker = null;
      this.abandon?.();
      this.abandon = null;
    }
  }

  return { AbandonedError, TaskRunner };
})();
