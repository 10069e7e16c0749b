// What a panel needs from the page and ipywidgets does not give: its keys stay its own, its sliders have names, no
// tooltip says "null", and its controls come back as they were left when the kernel is restarted.
const KEPT = Symbol.for("hswq_lab.controls"); // where → { initial, values }; lives as long as the page

// JupyterLab would take the arrow keys of a list to go to another cell.
function keepKeys(event) {
  event.target.setAttribute("data-lm-suppress-shortcuts", "true");
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

// Where a panel stands: its notebook, its cell, and what it is about.
function placeOf(panel, subject) {
  const notebook = panel.closest(".jp-NotebookPanel");
  const cells = notebook ? [...notebook.querySelectorAll(".jp-Cell")] : [];
  return `${notebook ? notebook.id : ""} ${cells.indexOf(panel.closest(".jp-Cell"))} ${subject}`;
}

// The controls of a new panel become those of the one that stood there before, unless the code has changed: then
// they begin with other values, and what the code says wins.
async function remember(panel, model) {
  const current = await model.widget_manager.get_model(model.get("current").slice("IPY_MODEL_".length));
  const kept = (globalThis[KEPT] ??= new Map());
  const place = placeOf(panel, model.get("subject"));
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

  function attach() {
    panel = el.closest(".hswq-panel");
    if (!panel) return;
    panel.addEventListener("focusin", keepKeys);
    observer.observe(panel, { childList: true, subtree: true });
    correct(panel);
    forget = remember(panel, model);
  }

  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    if (forget) forget.then((stop) => stop());
    if (panel) panel.removeEventListener("focusin", keepKeys);
  };
}

export default { render };
