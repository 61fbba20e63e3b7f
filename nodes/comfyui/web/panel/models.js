// The names in Load Model's list.
//
// The frontend's own remote list replaces the model of a saved workflow by the first of the list as soon as the service
// answers, and sends the label of its refresh button along as an input. So the list is fed from here, and what a
// workflow names stays in it, whether the service has it, lacks it, or is down.

const NODE = "MooredLoadModel";
const INPUT = "model";
const FRESH_MS = 5000;

export const isLoadModel = (name) => name === NODE;

// A definition whose list is a plain one.
export function withoutRemote(definition) {
  for (const group of Object.values(definition.input ?? {})) {
    const options = group?.[INPUT]?.[1];
    if (options) delete options.remote;
  }
}

export class ModelNames {
  constructor(api) {
    this.api = api;
    this.names = [];
    this.defaults = {};
    this.asked = -Infinity;
    this.listeners = new Set();
  }

  // Asks again where what is known is old.
  renew() {
    if (performance.now() - this.asked > FRESH_MS) this.refresh();
  }

  forget() {
    this.asked = -Infinity;
  }

  async refresh() {
    this.asked = performance.now();
    try {
      const answer = await this.api.fetchApi("/moored/models");
      if (!answer.ok) return;
      this.names = await answer.json();
      const defaults = await this.api.fetchApi("/moored/defaults");
      if (defaults.ok) this.defaults = await defaults.json();
    } catch {
      return; // ComfyUI does not answer, and says so itself.
    }
    for (const listener of this.listeners) listener();
  }
}

// Makes the list of a node's widget that of the service. A new node takes the first, the default.
export function feed(node, models) {
  const widget = node.widgets?.find((each) => each.name === INPUT);
  if (!widget) return;
  // One array for good, changed in place: nodes that are made of elements look at it again when their list opens, but
  // ask for it only once.
  const values = [];
  const fill = () => {
    const chosen = widget.value;
    const names = !chosen || models.names.includes(chosen) ? models.names : [...models.names, chosen];
    values.splice(0, values.length, ...names);
  };
  Object.defineProperty(widget.options, "values", {
    configurable: true,
    enumerable: true,
    get() {
      models.renew();
      fill();
      return values;
    },
    set() {}, // The frontend sets what the definition has: nothing.
  });
  const arrived = () => {
    if (!widget.value && models.names.length) widget.value = models.names[0];
    fill();
    node.setDirtyCanvas?.(true);
  };
  widget.value ??= "";
  models.listeners.add(arrived);
  after(node, "onConfigure", fill);
  after(node, "onRemoved", () => models.listeners.delete(arrived));
  arrived();
  models.renew();
}

// Does something more after what a node does already.
function after(node, name, more) {
  const own = node[name];
  node[name] = function (...given) {
    const answer = own?.apply(this, given);
    more();
    return answer;
  };
}
