// A worker for pages that are read from files, where browsers start none: the script runs in a
// hidden frame, which speaks by messages as a worker does. The site's search needs one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      // A worker's own words: its answers go to the page, and it loads further scripts in order.
      const words = () => {
        self.postMessage = (data) =>
          parent.dispatchEvent(new MessageEvent("message", { data, source: self }));
        self.importScripts = (...urls) =>
          urls.reduce(
            (before, next) =>
              before.then(
                () =>
                  new Promise((loaded, failed) => {
                    const script = document.createElement("script");
                    script.src = new URL(next, self.workerUrl).href;
                    script.onload = loaded;
                    script.onerror = failed;
                    document.body.appendChild(script);
                  }),
              ),
            Promise.resolve(),
          );
      };
      const address = JSON.stringify(String(new URL(url, location)));
      frame.srcdoc =
        `<body><script>self.workerUrl = ${address}; (${words})()<` + "/script>" +
        `<script src=${address}><` + "/script></body>";
      frame.addEventListener("load", () => {
        this.frame = frame;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      document.body.appendChild(frame);
      window.addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const heard = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(heard);
        if (this.onmessage) this.onmessage(heard);
      });
    }

    postMessage(data) {
      if (this.frame) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }

    terminate() {
      if (this.frame) this.frame.remove();
    }
  };
}
