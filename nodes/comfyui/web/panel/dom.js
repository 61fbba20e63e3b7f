// Elements from data: only ever as text, so that a name cannot become markup.

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(Boolean));
  return element;
}

export function button(text, act, options = {}) {
  const element = make("button", { type: "button", class: "moored-button", text, ...options });
  element.addEventListener("click", act);
  return element;
}

// A long name with places to break it: behind its signs, and not in the middle of a word.
export function writeName(element, text) {
  if (element.textContent === text) return;
  const parts = text.split(/(?<=[/+,@_-])/);
  element.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
}

// Writes only what is new, so that nothing flickers and a selection stays.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

// One view for each item, kept while the item is there: a button that is pressed or focused stays the same button.
export class Views {
  constructor(container, keyOf, create) {
    this.container = container;
    this.keyOf = keyOf;
    this.create = create;
    this.views = new Map();
  }

  update(items) {
    const gone = new Set(this.views.keys());
    items.forEach((item, index) => {
      const key = this.keyOf(item);
      gone.delete(key);
      let view = this.views.get(key);
      if (!view) this.views.set(key, (view = this.create(item)));
      if (this.container.children[index] !== view.element) {
        this.container.insertBefore(view.element, this.container.children[index] ?? null);
      }
      view.update(item);
    });
    for (const key of gone) {
      this.views.get(key).element.remove();
      this.views.delete(key);
    }
  }
}
