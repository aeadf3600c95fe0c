// Replaces the parts of the page that have changed; without it, the page is read again by hand.
"use strict";
const place = document.querySelector("[data-stream]");
let source = null;
// A browser has six connections to a host: hidden pages close theirs.
function follow() {
  if (source) source.close();
  source = null;
  if (document.hidden) return;
  source = new EventSource(place.dataset.stream);
  source.onmessage = show;
  source.onerror = say;
}
function show(message) {
  const next = new DOMParser().parseFromString(JSON.parse(message.data), "text/html");
  const opened = new Set([...document.querySelectorAll("details[open]")].map((one) => one.id));
  for (const part of document.querySelectorAll("main > [id], #trouble")) {
    const fresh = next.getElementById(part.id);
    if (part.contains(document.activeElement) && part.tagName === "FORM") continue;
    if (!fresh) part.remove();
  }
  let before = null;
  for (const fresh of next.querySelectorAll("main > [id], #trouble")) {
    for (const one of fresh.querySelectorAll("details")) one.open = opened.has(one.id);
    const part = document.getElementById(fresh.id);
    if (part && part.isEqualNode(fresh)) { before = part; continue; }
    if (part && part.tagName === "FORM" && part.contains(document.activeElement)) { before = part; continue; }
    const focus = part && part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const scrolled = part && part.querySelector("pre") ? part.querySelector("pre").scrollTop : 0;
    if (part) part.replaceWith(fresh);
    else if (before && before.parentElement.tagName === "MAIN") before.after(fresh);
    else document.querySelector("main").prepend(fresh);
    if (focus) for (const link of fresh.querySelectorAll("a")) if (link.getAttribute("href") === focus) link.focus();
    if (scrolled) fresh.querySelector("pre").scrollTop = scrolled;
    before = fresh;
  }
  document.title = next.title;
}
function say() {
  const trouble = document.getElementById("trouble");
  if (trouble && !trouble.firstElementChild) {
    const text = document.createElement("p");
    text.className = "trouble";
    text.textContent = "ddpjob ui does not answer since " + new Date().toISOString() + ". If it has ended, start it again; its new address has another token.";
    trouble.append(text);
  }
}
document.addEventListener("visibilitychange", follow);
follow();
