// A card: whose every byte is, and which models are there.

import { Views, button, make, show, write, writeName } from "./dom.js";
import { fill, size, time, words } from "./words.js";

// Each account that the bar shows, and what of the service's own accounts is in it.
const ACCOUNTS = {
  components: ["components"],
  scratch: ["scratch"],
  foreign: ["foreign"],
  other: ["context", "workspaces", "slack", "unexplained"],
  free: ["free"],
};

const bytesOf = (memory, account) => ACCOUNTS[account].reduce((sum, each) => sum + memory[each], 0);

class Bar {
  constructor() {
    this.parts = {};
    this.numbers = {};
    this.bar = make("div", { class: "moored-bar", role: "img" });
    this.legend = make("ul", { class: "moored-legend" });
    for (const account of Object.keys(ACCOUNTS)) {
      this.parts[account] = make("span", { class: `moored-part moored-${account}` });
      this.numbers[account] = make("span", { class: "moored-number" });
      this.bar.append(this.parts[account]);
      this.legend.append(
        make(
          "li",
          { "data-account": account },
          make("span", { class: `moored-key moored-${account}`, "aria-hidden": "true" }),
          make("span", { text: words.memory[account] }),
          this.numbers[account],
        ),
      );
    }
    this.other = make("p", { class: "moored-small" });
    this.element = make("div", {}, this.bar, this.legend, this.other);
  }

  update(memory) {
    const said = [];
    for (const account of Object.keys(ACCOUNTS)) {
      const bytes = bytesOf(memory, account);
      this.parts[account].style.flexGrow = String(memory.total ? bytes / memory.total : 0);
      show(this.parts[account], bytes > 0);
      write(this.numbers[account], size(bytes));
      said.push(`${words.memory[account]} ${size(bytes)}`);
    }
    this.bar.setAttribute("aria-label", said.join(", "));
    const others = ACCOUNTS.other.filter((each) => memory[each] > 0);
    write(
      this.other,
      others.length ? `${words.memory.other}: ${others.map((each) => `${words.memory[each]} ${size(memory[each])}`).join(", ")}` : "",
    );
    show(this.other, others.length > 0);
  }
}

class EntryView {
  constructor(key, actions) {
    this.key = key;
    this.actions = actions;
    this.name = make("span", { class: "moored-name" });
    writeName(this.name, key);
    this.bytes = make("span", { class: "moored-number" });
    this.badges = new Views(make("span", { class: "moored-badges" }), String, (text) => ({
      element: make("span", { class: "moored-badge", text }),
      update() {},
    }));
    this.components = make("p", { class: "moored-small" });
    this.pin = button("", () => this.togglePin());
    this.unload = button(words.entries.unload, () => this.askUnload(), {
      "aria-label": fill(words.entries.unload_label, { model: key }),
    });
    this.question = make("p", {});
    this.no = button(words.entries.confirm_no, () => this.answered());
    const yes = button(words.entries.confirm_yes, () => this.unloadAnyway(), { class: "moored-button moored-danger" });
    const choice = make("div", { class: "moored-buttons" }, yes, this.no);
    this.confirm = make("div", { class: "moored-confirm", role: "alertdialog", "aria-label": key }, this.question, choice);
    this.confirm.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.answered();
    });
    this.confirm.hidden = true;
    this.element = make(
      "li",
      { class: "moored-entry", "data-key": key },
      make("div", { class: "moored-row" }, this.name, this.bytes),
      make("div", { class: "moored-row" }, this.badges.container, make("div", { class: "moored-buttons" }, this.pin, this.unload)),
      this.components,
      this.confirm,
    );
  }

  update(entry) {
    this.entry = entry;
    write(this.bytes, size(entry.bytes));
    const badges = [];
    if (entry.state !== "resident") badges.push(words.entries[entry.state]);
    if (entry.pinned) badges.push(words.entries.pinned);
    if (entry.held) badges.push(words.entries.held);
    if (entry.in_use) badges.push(words.entries.in_use);
    else if (entry.jobs) badges.push(words.entries.wanted);
    this.badges.update(badges);
    const named = entry.components.map((part) => {
      const name = part.shared_with.length ? fill(words.entries.shared, { name: part.name }) : part.name;
      if (part.bytes >= part.whole_bytes) return name;
      return fill(words.entries.streamed, { name, bytes: size(part.bytes), whole: size(part.whole_bytes) });
    });
    write(this.components, named.join(", "));
    write(this.pin, entry.pinned ? words.entries.unpin : words.entries.pin);
    const label = entry.pinned ? words.entries.unpin_label : words.entries.pin_label;
    this.pin.setAttribute("aria-label", fill(label, { model: this.key }));
    write(this.question, fill(words.entries.confirm, { count: entry.jobs }));
  }

  togglePin() {
    this.actions.pin(this.key, !this.entry.pinned);
  }

  askUnload() {
    if (!this.entry.jobs) {
      this.actions.unload(this.key, false);
      return;
    }
    show(this.confirm, true);
    this.no.focus();
  }

  unloadAnyway() {
    this.answered();
    this.actions.unload(this.key, true);
  }

  answered() {
    show(this.confirm, false);
    this.unload.focus();
  }
}

export class CardView {
  constructor(card, actions) {
    const heading = make("h3", { text: card.name || card.id });
    this.state = make("span", { class: "moored-badge" });
    this.used = make("p", { class: "moored-small" });
    this.bar = new Bar();
    const notes = make("ul", { class: "moored-notes" });
    this.notes = new Views(notes, String, (text) => ({ element: make("li", { text }), update() {} }));
    this.entries = new Views(
      make("ul", { class: "moored-entries", "aria-label": words.entries.title }),
      (entry) => entry.key,
      (entry) => new EntryView(entry.key, actions),
    );
    this.none = make("p", { class: "moored-small", text: words.entries.none });
    this.element = make(
      "section",
      { class: "moored-card", "aria-label": card.name || card.id, "data-card": card.id },
      make("div", { class: "moored-row" }, heading, this.state),
      this.used,
      this.bar.element,
      notes,
      make("h4", { text: words.entries.title }),
      this.none,
      this.entries.container,
    );
  }

  update(card) {
    const { memory } = card;
    write(this.state, words.card_states[card.state] ?? card.state);
    this.state.dataset.state = card.state;
    const used = size(memory.total - memory.free);
    write(this.used, `${card.id} · ${fill(words.memory.of, { used, total: size(memory.total) })}`);
    // For whoever asks why a card is slow; to others it says nothing.
    this.used.title = card.attention ? fill(words.attention, { by: card.attention }) : "";
    this.bar.update(memory);
    this.notes.update(notesOf(card));
    this.entries.update(card.entries);
    show(this.none, card.entries.length === 0);
  }
}

function notesOf(card) {
  const holds = card.holders.map((holder) =>
    fill(words.memory.holds, {
      name: holder.pid ? `${holder.name} ${holder.pid}` : holder.name,
      bytes: size(holder.bytes),
    }),
  );
  const reserved = card.reservations.map((one) =>
    fill(words.memory.reserved, { bytes: size(one.bytes), label: one.label || one.id, time: time(one.expires_in_ms) }),
  );
  const host = card.host_bytes ? [fill(words.memory.host, { bytes: size(card.host_bytes) })] : [];
  const restarts = card.worker_restarts ? [fill(words.memory.restarts, { count: card.worker_restarts })] : [];
  // Two alike are one line: the list is kept by what it says.
  return [...new Set([...holds, ...reserved, ...host, ...restarts])];
}
