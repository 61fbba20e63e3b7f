// The names in the lists of Load Model, Load LoRA and Apply ControlNet.
//
// The frontend's own remote list replaces the model of a saved workflow by the first of the list as soon as the service
// answers, and sends the label of its refresh button along as an input. So the lists are fed from here, and what a
// workflow names stays in them, whether the service has it, lacks it, or is down.

// By node, the input that has the list.
const INPUTS = { MooredLoadModel: "model", MooredLoadLoRA: "lora", MooredApplyControlNet: "control_net" };
const FRESH_MS = 5000;

export const isLoadModel = (name) => name === "MooredLoadModel";
export const takesAdapter = (name) => name === "MooredLoadLoRA" || name === "MooredApplyControlNet";

// A definition whose list is a plain one.
export function withoutRemote(definition) {
  for (const group of Object.values(definition.input ?? {})) {
    const options = group?.[INPUTS[definition.name]]?.[1];
    if (options) delete options.remote;
  }
}

class Names {
  constructor(api, route) {
    this.api = api;
    this.route = route;
    this.names = [];
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
      const answer = await this.api.fetchApi(this.route);
      if (!answer.ok) return;
      this.names = await answer.json();
      await this.askMore();
    } catch {
      return; // ComfyUI does not answer, and says so itself.
    }
    for (const listener of this.listeners) listener();
  }

  async askMore() {}
}

export class ModelNames extends Names {
  constructor(api) {
    super(api, "/moored/models");
    this.defaults = {};
  }

  async askMore() {
    const defaults = await this.api.fetchApi("/moored/defaults");
    if (defaults.ok) this.defaults = await defaults.json();
  }
}

export class LoraNames extends Names {
  constructor(api) {
    super(api, "/moored/loras");
  }
}

// Makes the list of a node's widget that of the service. A new node takes the first: of models the default.
export function feed(node, known) {
  const widget = node.widgets?.find((each) => each.name === INPUTS[node.comfyClass]);
  if (!widget) return;
  // One array for good, changed in place: nodes that are made of elements look at it again when their list opens, but
  // ask for it only once.
  const values = [];
  const fill = () => {
    const chosen = widget.value;
    const names = !chosen || known.names.includes(chosen) ? known.names : [...known.names, chosen];
    values.splice(0, values.length, ...names);
  };
  Object.defineProperty(widget.options, "values", {
    configurable: true,
    enumerable: true,
    get() {
      known.renew();
      fill();
      return values;
    },
    set() {}, // The frontend sets what the definition has: nothing.
  });
  const arrived = () => {
    if (!widget.value && known.names.length) widget.value = known.names[0];
    fill();
    node.setDirtyCanvas?.(true);
  };
  widget.value ??= "";
  known.listeners.add(arrived);
  after(node, "onConfigure", fill);
  after(node, "onRemoved", () => known.listeners.delete(arrived));
  arrived();
  known.renew();
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
