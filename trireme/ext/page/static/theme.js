// The theme before the first paint: the one that was chosen here, else the system's.
{
  let theme = "";
  try { theme = localStorage.getItem("trireme-theme") || ""; } catch { /* no storage in a file */ }
  if (theme) document.documentElement.dataset.theme = theme;
}
