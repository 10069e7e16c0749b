// What a panel needs from the page and ipywidgets does not give: its keys stay its own, its sliders have names, and no
// tooltip says "null".

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

function render({ el }) {
  const frame = requestAnimationFrame(attach); // the panel around this element comes to the page after it
  let panel = null;
  const observer = new MutationObserver(() => correct(panel));

  function attach() {
    panel = el.closest(".hswq-panel");
    if (!panel) return;
    panel.addEventListener("focusin", keepKeys);
    observer.observe(panel, { childList: true, subtree: true });
    correct(panel);
  }

  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    if (panel) panel.removeEventListener("focusin", keepKeys);
  };
}

export default { render };
