// The button in the settings that says what answers at the address.

import { button, make, write } from "./dom.js";
import { words } from "./words.js";

export function testButton(api) {
  const said = make("span", { class: "moored-tested", role: "status" });
  const test = button(words.test.button, async () => {
    test.disabled = true;
    write(said, words.test.asking);
    delete said.dataset.answers;
    try {
      const answer = await api.fetchApi("/moored/test");
      const told = await answer.json();
      write(said, told.said ?? told.error);
      said.dataset.answers = String(told.answers === true);
    } catch {
      write(said, words.comfyui_gone);
    }
    test.disabled = false;
  });
  return make("div", { class: "moored-test" }, test, said);
}
