// The sidebar panel: fed by the pack's own stream while it is looked at, and by nothing otherwise.

import { CardView } from "./card.js";
import { Views, button, make, show, write } from "./dom.js";
import { QueueView } from "./queue.js";
import { fill, size, words } from "./words.js";

export class Panel {
  constructor(container, api) {
    this.api = api;
    this.stream = null;
    const actions = {
      pin: (model, pinned) => this.pin(model, pinned),
      unload: (model, force) => this.unload(model, force),
      cancel: (job) => this.cancel(job),
    };
    this.endpoint = make("span", { class: "moored-small" });
    // Present from the start: what appears together with its text is not read out.
    this.said = make("p", { class: "moored-said", role: "status" });
    this.connecting = make("p", { class: "moored-small", text: words.connecting });
    this.problem = make("p", {});
    const again = button(words.try_now, () => this.reconnect());
    this.begin = button(words.start, () => this.startService());
    this.down = make(
      "div",
      { class: "moored-down", role: "alert" },
      make("strong", { text: words.down }),
      this.problem,
      make("p", { class: "moored-small", text: words.trying }),
      make("div", { class: "moored-buttons" }, again, this.begin),
    );
    this.noCards = make("p", { class: "moored-small", text: words.no_cards });
    this.cards = new Views(make("div", {}), (card) => card.id, (card) => new CardView(card, actions));
    this.queue = new QueueView(actions);
    this.up = make("div", { class: "moored-up" }, this.noCards, this.cards.container, this.queue.element);
    this.element = make(
      "section",
      { class: "moored-panel", "aria-label": "moored" },
      make("header", { class: "moored-row" }, make("h2", { text: "moored" }), this.endpoint),
      this.said,
      this.connecting,
      this.down,
      this.up,
    );
    show(this.down, false);
    show(this.up, false);
    container.replaceChildren(this.element);
    // A browser opens six connections to a server at most: pages that nobody sees must hold none.
    this.seen = () => (document.hidden ? this.stop() : this.start());
    document.addEventListener("visibilitychange", this.seen);
    this.seen();
  }

  close() {
    document.removeEventListener("visibilitychange", this.seen);
    this.stop();
    this.element.remove();
  }

  start() {
    if (this.stream) return;
    this.stream = new EventSource(this.api.apiURL("/moored/events"));
    this.stream.onmessage = (message) => this.update(JSON.parse(message.data));
    this.stream.onerror = () => {
      this.showProblem(words.comfyui_gone);
      // The browser tries again by itself, unless it was refused: then it is closed for good.
      if (this.stream.readyState === EventSource.CLOSED) this.again = setTimeout(() => this.reconnect(), 3000);
    };
  }

  stop() {
    clearTimeout(this.again);
    this.stream?.close();
    this.stream = null;
  }

  reconnect() {
    this.stop();
    this.start();
  }

  update(snapshot) {
    write(this.endpoint, snapshot.endpoint);
    if (!snapshot.reachable) {
      this.showProblem(snapshot.problem, snapshot.can_start);
      return;
    }
    show(this.connecting, false);
    show(this.down, false);
    show(this.up, true);
    show(this.noCards, snapshot.cards.length === 0);
    this.cards.update(snapshot.cards);
    this.queue.update(snapshot.jobs);
  }

  showProblem(sentence, canStart = false) {
    show(this.connecting, false);
    show(this.begin, canStart);
    show(this.up, false);
    write(this.problem, sentence);
    show(this.down, true);
  }

  async startService() {
    this.begin.disabled = true;
    if (await this.post("/moored/start", {})) this.reconnect();
    this.begin.disabled = false;
  }

  async pin(model, pinned) {
    const done = await this.post("/moored/pin", { model, pinned });
    if (done) this.say(fill(pinned ? words.said.pinned : words.said.unpinned, { model }));
  }

  async unload(model, force) {
    const done = await this.post("/moored/unload", { model, force });
    if (!done) return;
    const sentences = [fill(words.said.unloaded, { model, bytes: size(done.freed_bytes) })];
    const parts = done.kept.map((part) => `${part.name} (${part.reason})`).join(", ");
    if (parts) sentences.push(fill(words.said.kept, { parts }));
    this.say(sentences.join(" "));
  }

  async cancel(job) {
    const done = await this.post("/moored/cancel", { job });
    if (done) this.say(fill(done.cancelled ? words.said.cancelled : words.said.ended, { job }));
  }

  // What the route answers; null after saying why it failed.
  async post(route, body) {
    this.say("");
    let why = words.comfyui_gone;
    try {
      const answer = await this.api.fetchApi(route, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
      });
      const said = await answer.json();
      if (answer.ok) return said;
      why = said.error;
    } catch {
      // Said below.
    }
    this.say(fill(words.said.failed, { why }), true);
    return null;
  }

  say(sentence, failed = false) {
    this.said.classList.toggle("moored-failed", failed);
    write(this.said, sentence);
  }
}
