// What ComfyUI's frontend loads of this pack: settings, the sidebar panel, and the lists of models and LoRAs.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { Labels, fold } from "./panel/inputs.js";
import { LoraNames, ModelNames, feed, isLoadModel, takesAdapter, withoutRemote } from "./panel/models.js";
import { Panel } from "./panel/panel.js";
import { testButton } from "./panel/test.js";
import { chooseLanguage, words } from "./panel/words.js";

const TAB = "moored";

const names = new ModelNames(api);
const loras = new LoraNames(api);
const labels = new Labels(app, names);
let panel = null;

function addressChanged() {
  names.forget();
  loras.forget();
  panel?.reconnect();
}

async function language() {
  try {
    const answer = await api.fetchApi("/i18n");
    chooseLanguage(await answer.json(), app.extensionManager.setting.get("Comfy.Locale"));
  } catch {
    // The English words are in the script.
  }
}

function style() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./panel/panel.css", import.meta.url).href;
  document.head.append(link);
}

app.registerExtension({
  name: "moored",

  settings: [
    {
      id: "moored.endpoint",
      name: "Address of the service",
      tooltip:
        "host:port, or https://host:port for TLS. Empty: MOORED_ENDPOINT of ComfyUI's environment, else 127.0.0.1:50051.",
      category: ["moored", "Service", "endpoint"],
      sortOrder: 3,
      type: "text",
      defaultValue: "",
      attrs: { placeholder: "127.0.0.1:50051" },
      onChange: addressChanged,
    },
    {
      id: "moored.token_file",
      name: "Token file",
      tooltip: "Name of a file with the service's token, in the folder moored of ComfyUI's user directory. Empty: the token of MOORED_TOKEN_FILE, sent to the service of MOORED_ENDPOINT alone.",
      category: ["moored", "Service", "token_file"],
      sortOrder: 2,
      type: "text",
      defaultValue: "",
      attrs: { placeholder: "token" },
      onChange: addressChanged,
    },
    {
      id: "moored.test",
      name: "Test the connection",
      tooltip: "Says which service answers at this address, with its version and GPUs, or why none does.",
      category: ["moored", "Service", "test"],
      sortOrder: 1,
      type: () => testButton(api),
      defaultValue: null,
    },
    {
      id: "moored.start_service",
      name: "Start a service where none runs",
      tooltip:
        "On ComfyUI's machine, when a node needs one: if no address is set here or by MOORED_ENDPOINT, none answers at 127.0.0.1:50051, and the package moored-service is installed. It ends with ComfyUI, or keeps running for other programs.",
      category: ["moored", "Service", "start_service"],
      sortOrder: 0,
      type: "combo",
      options: ["while ComfyUI runs", "keep it running", "never"],
      defaultValue: "while ComfyUI runs",
    },
    {
      id: "moored.unload_own_models",
      name: "Unload ComfyUI's own models for jobs that wait",
      tooltip:
        "If a job of this ComfyUI waits for GPU memory that ComfyUI itself holds, ComfyUI unloads its own models, once in each wait, and loads them again when it needs them. Only for a service on ComfyUI's machine.",
      category: ["moored", "Memory", "unload_own_models"],
      type: "boolean",
      defaultValue: true,
    },
  ],

  async setup() {
    style();
    await language();
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-server",
      title: "moored",
      tooltip: words.tab_tip,
      type: "custom",
      render(element) {
        panel?.close();
        panel = new Panel(element, api);
      },
      destroy() {
        panel?.close();
        panel = null;
      },
    });
  },

  beforeRegisterNodeDef(_type, definition) {
    if (isLoadModel(definition.name) || takesAdapter(definition.name)) withoutRemote(definition);
  },

  nodeCreated(node) {
    if (isLoadModel(node.comfyClass)) feed(node, names);
    if (takesAdapter(node.comfyClass)) feed(node, loras);
    fold(node);
    labels.follow(node);
  },

  afterConfigureGraph() {
    labels.write();
  },

  refreshComboInNodes() {
    return Promise.all([names.refresh(), loras.refresh()]);
  },
});
