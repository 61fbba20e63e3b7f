// Writes dist/SOURCES: a hash over what the bundle is made of. tests/page/test_bundle.py computes the same without Node.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const PLACES = [
  "src",
  "protos",
  "index.html",
  "package.json",
  "package-lock.json",
  "buf.gen.yaml",
  "tsconfig.json",
  "vite.config.js",
  "sources.js",
  "../../../proto/moored",
];

function filesOf(place) {
  if (!statSync(place).isDirectory()) return [place];
  // What is generated follows from the rest.
  return readdirSync(place).flatMap((name) => (place === "src" && name === "proto" ? [] : filesOf(join(place, name))));
}

const hash = createHash("sha256");
for (const file of PLACES.flatMap(filesOf)
  .map((file) => file.replaceAll("\\", "/"))
  .sort()) {
  const content = createHash("sha256").update(readFileSync(file)).digest("hex");
  hash.update(`${content}  ${file}\n`);
}
writeFileSync("dist/SOURCES", `${hash.digest("hex")}\n`);
