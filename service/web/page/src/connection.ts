// The connection to the service that this page is from: gRPC-Web at its own address, and the token.

import { Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcWebTransport } from "@connectrpc/connect-web";
import { signal } from "@preact/signals";
import { BadRequestSchema, ErrorInfoSchema } from "./proto/google/rpc/status_pb";
import { type Fallback, MemoryShortfallSchema } from "./proto/moored/v1/errors_pb";
import { Generation } from "./proto/moored/v1/generation_pb";
import { Hub } from "./proto/moored/v1/hub_pb";
import { Jobs } from "./proto/moored/v1/jobs_pb";
import { Residency } from "./proto/moored/v1/residency_pb";
import { Server } from "./proto/moored/v1/server_pb";

const TOKEN = "moored.token";

/** The name that jobs of this page have in the list of jobs. */
export const CLIENT_ID = "web page";

/** Whether the page must ask for a token, and why. */
export const tokenWanted = signal<"no" | "missing" | "refused">("no");

/** Whether a token is in use, for the button that forgets it. */
export const hasToken = signal(false);

let token = "";

/** Takes the token of a link (`#token=...`) or of an earlier visit. A link's is removed from the address at once. */
export function takeStoredToken(): void {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const linked = fragment.get("token");
  if (linked) {
    fragment.delete("token");
    const rest = fragment.toString().replace(/=$/, "");
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
    keepToken(linked, false);
    return;
  }
  token = read(sessionStorage) || read(localStorage);
  hasToken.value = token !== "";
}

function read(storage: Storage): string {
  return storage.getItem(TOKEN) ?? "";
}

export function keepToken(given: string, remember: boolean): void {
  token = given.trim();
  hasToken.value = token !== "";
  sessionStorage.setItem(TOKEN, token);
  if (remember) localStorage.setItem(TOKEN, token);
  tokenWanted.value = "no";
}

export function forgetToken(): void {
  token = "";
  hasToken.value = false;
  sessionStorage.removeItem(TOKEN);
  localStorage.removeItem(TOKEN);
}

const withToken: Interceptor = (next) => (request) => {
  // A token has visible ASCII only: what else was typed is no token, and a browser refuses it in a header.
  if (/^[\x21-\x7e]+$/.test(token)) request.header.set("authorization", `Bearer ${token}`);
  return next(request);
};

const transport = createGrpcWebTransport({ baseUrl: location.origin, interceptors: [withToken] });

export const server = createClient(Server, transport);
export const residency = createClient(Residency, transport);
export const jobs = createClient(Jobs, transport);
export const generation = createClient(Generation, transport);
export const hub = createClient(Hub, transport);

/** An error of a call, for people, with what would fit instead. */
export interface Problem {
  message: string;
  reason: string;
  fields: { field: string; description: string }[];
  fallbacks: Fallback[];
}

export function isUnauthenticated(error: unknown): boolean {
  return ConnectError.from(error).code === Code.Unauthenticated;
}

/** Whether an error is of the connection, and not an answer of the service. */
export function isGone(error: unknown): boolean {
  const failure = ConnectError.from(error);
  return (
    failure.findDetails(ErrorInfoSchema).length === 0 &&
    [Code.Unavailable, Code.Unknown, Code.Internal, Code.Canceled, Code.DeadlineExceeded].includes(failure.code)
  );
}

/** What an error says. One that asks for a token has the page ask for it. */
export function problemOf(error: unknown): Problem {
  const failure = ConnectError.from(error);
  if (failure.code === Code.Unauthenticated) askForToken();
  const [info] = failure.findDetails(ErrorInfoSchema);
  const [fields] = failure.findDetails(BadRequestSchema);
  const [shortfall] = failure.findDetails(MemoryShortfallSchema);
  const message = isGone(failure)
    ? "The connection to the service was lost."
    : failure.rawMessage || `The service answered with code ${failure.code}.`;
  return {
    message,
    reason: info?.reason ?? "",
    fields: fields?.fieldViolations ?? [],
    fallbacks: shortfall?.fallbacks ?? [],
  };
}

export function askForToken(): void {
  if (tokenWanted.value === "no") tokenWanted.value = hasToken.value ? "refused" : "missing";
}
