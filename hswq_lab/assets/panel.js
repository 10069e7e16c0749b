// What a panel needs from the page and ipywidgets does not give: its keys stay its own, its sliders have names, no
// tooltip says "null", and its controls come back as they were left when the kernel is restarted.
const KEPT = Symbol.for("hswq_lab.controls"); // place → { initial, values }; lives as long as the page

// What JupyterLab would take from a control, the arrows of a list to go to another cell among them. All other keys are
// JupyterLab's: what is pressed with Ctrl or Cmd, but for what edits a text, and letters where nothing can be typed.
const TYPED = 'input:not([type="checkbox"], [type="radio"]), textarea, select, [contenteditable="true"]';
const MOVING = /^(Arrow(Up|Down|Left|Right)|Page(Up|Down)|Home|End|Enter| )$/;
const TYPING = /^(.|Backspace|Delete)$/u;
const EDITING = /^[acvxyz]$/i;

function ownKey({ target, key, ctrlKey, metaKey, shiftKey }) {
  const typed = target.matches(TYPED);
  if (ctrlKey || metaKey) return typed && EDITING.test(key);
  if (shiftKey && key === "Enter") return false;
  return MOVING.test(key) || (typed && TYPING.test(key));
}

// A text field of ipywidgets lets no key out: JupyterLab gets a copy of its own ones from the panel.
function passOn(event, panel) {
  const copy = new KeyboardEvent(event.type, event);
  event.stopPropagation();
  if (!panel.dispatchEvent(copy)) event.preventDefault();
}

// Enter in a text field of a form presses its first button, once the text is on its way to the kernel.
function submit({ target, key, isComposing }) {
  const form = target.closest(".hswq-form");
  if (!form || key !== "Enter" || isComposing || !target.matches('input[type="text"]')) return;
  target.dispatchEvent(new Event("change", { bubbles: true }));
  form.querySelector("button").click();
}

// A slider's handle is what has the focus, and ipywidgets leaves it without a name for screen readers. To labels
// without a tooltip it gives the tooltip "null".
function correct(panel) {
  for (const label of panel.querySelectorAll('.widget-label[title="null"]')) label.removeAttribute("title");
  for (const handle of panel.querySelectorAll(".noUi-handle:not([aria-label])")) {
    const slider = handle.closest(".widget-hslider");
    const label = slider && slider.querySelector(".widget-label");
    if (label) handle.setAttribute("aria-label", label.title || label.textContent);
  }
}

// The controls of a new panel become those of the one that stood there before, unless the code has changed: then
// they begin with other values, and what the code says wins.
async function remember(panel, model) {
  const current = await model.widget_manager.get_model(model.get("current").slice("IPY_MODEL_".length));
  const kept = (globalThis[KEPT] ??= new Map());
  const notebook = panel.closest(".jp-NotebookPanel"); // a copy of a notebook has cells of the same ids
  const place = `${notebook ? notebook.id : ""} ${model.get("place")}`;
  const initial = JSON.stringify(model.get("initial"));
  const keep = () => kept.set(place, { initial, values: current.get("value") });
  const before = kept.get(place);
  if (before && before.initial === initial) model.send({ event: "restore", values: before.values });
  else keep();
  current.on("change:value", keep);
  return () => current.off("change:value", keep);
}

function render({ model, el }) {
  const frame = requestAnimationFrame(attach); // the panel around this element comes to the page after it
  let panel = null;
  let forget = null;
  const observer = new MutationObserver(() => correct(panel));

  // Before JupyterLab and ipywidgets look at the key.
  function keyPressed(event) {
    if (!panel.contains(event.target)) return;
    const own = ownKey(event);
    event.target.toggleAttribute("data-lm-suppress-shortcuts", own);
    if (own) submit(event);
    else if (event.target.matches(TYPED)) passOn(event, panel);
  }

  function attach() {
    panel = el.closest(".hswq-panel");
    if (!panel) return;
    window.addEventListener("keydown", keyPressed, true);
    observer.observe(panel, { childList: true, subtree: true });
    correct(panel);
    if (model.get("place")) forget = remember(panel, model);
  }

  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    if (forget) forget.then((stop) => stop());
    window.removeEventListener("keydown", keyPressed, true);
  };
}

export default { render };
