// Builds the page into dist, as the service has it: index.html at /, the rest at /assets. MOORED_SERVICE is the address of
// a service for `npm run dev`.
import { defineConfig } from "vite";

const service = process.env.MOORED_SERVICE ?? "http://127.0.0.1:50051";

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    // What has light-dark() of CSS.
    target: ["chrome123", "firefox120", "safari17.5"],
    assetsInlineLimit: 0,
    modulePreload: false,
    sourcemap: false,
    license: { fileName: "assets/licences.md" },
  },
  server: { proxy: { "^/(moored|grpc)\\.": service } },
});
