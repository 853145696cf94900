// The compressed blocks of the page, or of its server.

/** The bytes of a block. */
export async function block(id) {
  const element = document.getElementById(id);
  let packed;
  if (element) packed = new Blob([fromBase64(element.textContent)]).stream();
  else if (isServed()) packed = (await answered(`block/${encodeURIComponent(id)}`)).body;
  else throw new Error(`this page has no block ${id}`);
  return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** A block that holds JSON. */
export async function jsonBlock(id) {
  return JSON.parse(new TextDecoder().decode(await block(id)));
}

/** The answer of the server to a request, as JSON. */
export async function asked(question) {
  return (await answered(question)).json();
}

/** Whether the page has a server. */
export function isServed() {
  return document.body.hasAttribute("data-served");
}

async function answered(path) {
  const response = await fetch(path, { cache: "no-store" }).catch(() => {
    throw new Error("tensortap view has stopped: start it again and open the address that it prints");
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error || `the server answered ${response.status}`);
}

/** Bytes from base64. */
export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const decoded = atob(text);
  const bytes = new Uint8Array(decoded.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = decoded.charCodeAt(at);
  return bytes;
}
