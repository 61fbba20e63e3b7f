// The inputs of the pack's nodes: those for experts folded, and the model's own values beside those that stand for them.

import { isLoadModel } from "./models.js";

const OURS = /^Moored/;
// Of nodes that start from a picture, the size is the picture's.
const SIZES = ["width", "height"];

// The classic canvas folds by the widget's own mark, Nodes 2.0 by that of its options.
export function fold(node) {
  if (!OURS.test(node.comfyClass ?? "")) return;
  for (const widget of node.widgets ?? []) {
    if (widget.options?.advanced) widget.advanced = true;
  }
  const least = node.computeSize?.();
  if (least && node.size) node.setSize?.([node.size[0], least[1]]);
}

export class Labels {
  constructor(app, models) {
    this.app = app;
    this.models = models;
    models.listeners.add(() => this.write());
  }

  // A node says where its links and its model change.
  follow(node) {
    if (!OURS.test(node.comfyClass ?? "")) return;
    const later = () => setTimeout(() => this.write());
    after(node, "onConnectionsChange", later);
    if (isLoadModel(node.comfyClass)) for (const widget of node.widgets ?? []) after(widget, "callback", later);
  }

  write() {
    for (const node of this.app.graph?.nodes ?? []) {
      if (OURS.test(node.comfyClass ?? "") && !isLoadModel(node.comfyClass)) this.label(node);
    }
  }

  label(node) {
    const defaults = this.models.defaults[modelOf(node)] ?? {};
    const hasPicture = node.comfyClass === "MooredImageToImage" || linked(node, "image") !== undefined;
    for (const widget of node.widgets ?? []) {
      widget.mooredLabel ??= widget.label ?? widget.name;
      // The smallest value that can be entered stands for the model's own.
      const known = defaults[widget.name];
      const isOpen = known !== undefined && !(hasPicture && SIZES.includes(widget.name));
      const label = isOpen ? `${widget.mooredLabel} (${widget.options?.min ?? 0}: ${known})` : widget.mooredLabel;
      if (label !== (widget.label ?? widget.name)) widget.label = label;
    }
    node.setDirtyCanvas?.(true);
  }
}

// The node that an input is linked to.
function linked(node, name) {
  const id = node.inputs?.find((each) => each.name === name)?.link;
  if (id === null || id === undefined) return undefined;
  const link = node.graph?.getLink?.(id) ?? node.graph?.links?.[id];
  return link ? node.graph.getNodeById(link.origin_id) : undefined;
}

// The model that comes to a node, through others that pass it on.
function modelOf(node, passed = new Set()) {
  if (!node || passed.has(node)) return "";
  if (isLoadModel(node.comfyClass)) {
    const value = (name) => (node.widgets?.find((each) => each.name === name)?.value ?? "").trim();
    return value("other_model") || value("model");
  }
  passed.add(node);
  return modelOf(linked(node, "model"), passed);
}

// Does something more after what a thing does already.
function after(thing, name, more) {
  const own = thing[name];
  thing[name] = function (...given) {
    const answer = own?.apply(this, given);
    more();
    return answer;
  };
}
