// A stand-in of ComfyUI's `app`: what the pack's script registers, and how ComfyUI would use it.

const extensions = [];
const tabs = [];
const settings = new Map();
let open = null;

export const app = {
  settings,
  tabs,
  extensions,

  extensionManager: {
    registerSidebarTab: (tab) => tabs.push(tab),
    setting: { get: (id) => settings.get(id), set: (id, value) => settings.set(id, value) },
  },

  registerExtension: (extension) => extensions.push(extension),

  async start() {
    for (const extension of extensions) await extension.setup?.();
  },

  openTab(id) {
    this.closeTab();
    open = tabs.find((tab) => tab.id === id);
    open.render(document.getElementById("sidebar"));
  },

  closeTab() {
    open?.destroy?.();
    open = null;
  },

  // A node as the frontend makes it from a definition: its list is remote where the definition says so.
  async createNode(definition, saved) {
    for (const extension of extensions) await extension.beforeRegisterNodeDef?.(class {}, definition);
    const widgets = Object.entries(definition.input.required).map(([name, [, options]]) => ({
      name,
      value: options.default,
      options: { values: options.options ?? [] },
    }));
    const node = { comfyClass: definition.name, widgets, redrawn: 0, setDirtyCanvas: () => (node.redrawn += 1) };
    for (const extension of extensions) extension.nodeCreated?.(node);
    if (saved !== undefined) widgets[0].value = saved;
    return node;
  },
};
