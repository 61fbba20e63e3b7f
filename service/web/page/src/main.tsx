import { render } from "preact";
import { App } from "./app";
import { takeStoredToken } from "./connection";
import { follow } from "./live";
import { hasWork } from "./runs";
import { applyTheme } from "./theme";
import "./page.css";

takeStoredToken();
applyTheme();
render(<App />, document.getElementById("page")!);
void follow();

window.addEventListener("beforeunload", (event) => {
  // Jobs of this page end with it.
  if (hasWork()) event.preventDefault();
});
