// Replaces the parts of the page that have changed; without it, the page is read again by hand.
"use strict";
const place = document.querySelector("[data-stream]");
const source = new EventSource(place.dataset.stream);
source.onmessage = (message) => {
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
};
source.onerror = () => {
  const trouble = document.getElementById("trouble");
  if (trouble && !trouble.firstElementChild) {
    const text = document.createElement("p");
    text.className = "trouble";
    text.textContent = "ddpjob ui does not answer since " + new Date().toISOString() + ": it was ended, or this machine sleeps. Start it again.";
    trouble.append(text);
  }
};
