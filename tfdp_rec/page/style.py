"""How a page of `tfdp_rec.page` looks: one column, light or dark as the reader has it, on a telephone as on a desk."""

STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d2430; --soft: #596372; --line: #e2e5ea; --panel: #f6f7f9;
  --accent: #5a3a94; --marked: #f4f0fb; --warn: #8a5200; --warn-paper: #fff8e8; --warn-line: #e9b44c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171c; --ink: #e4e7ec; --soft: #9aa4b2; --line: #2c323b; --panel: #1c2027;
    --accent: #b9a2ea; --marked: #251f35; --warn: #f0c674; --warn-paper: #241e12; --warn-line: #8a6a24;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; overflow-wrap: break-word; }
h1 { margin: 0 0 1rem; font-size: 1.75rem; line-height: 1.2; letter-spacing: -0.01em; }
h2 {
  margin: 3rem 0 0.75rem; padding-top: 1.5rem; border-top: 1px solid var(--line); font-size: 1.25rem; line-height: 1.3;
}
h3 { margin: 1.75rem 0 0.5rem; font-size: 1rem; }
p, ul, dl { max-width: 48rem; margin: 0 0 1rem; }
ul { padding-left: 1.25rem; }
li + li { margin-top: 0.35rem; }
code, pre {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.85em;
}
code { padding: 0.1em 0.3em; border-radius: 4px; background: var(--panel); }
pre {
  margin: 0 0 1rem; padding: 0.9rem 1rem; border: 1px solid var(--line); border-radius: 8px; background: var(--panel);
  font-size: 0.8rem; line-height: 1.5; overflow-x: auto; white-space: pre;
}
pre.broken { white-space: pre-wrap; overflow-wrap: anywhere; }
.warning {
  max-width: none; padding: 0.8rem 1rem; border: 1px solid var(--warn-line); border-left-width: 5px; border-radius: 8px;
  background: var(--warn-paper); color: var(--warn);
}
ul.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 13rem), 1fr)); gap: 0.75rem;
  max-width: none; margin: 1.5rem 0; padding: 0; list-style: none;
}
.figures li {
  margin: 0; padding: 0.8rem 1rem; border: 1px solid var(--line); border-radius: 10px; background: var(--panel);
}
.figures span, .figures small { display: block; color: var(--soft); font-size: 0.8rem; line-height: 1.4; }
.figures b {
  display: block; font-size: 1.75rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums;
}
.wide { margin: 0 0 1rem; border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 0.9rem; line-height: 1.45; }
th, td { padding: 0.5rem 0.8rem; text-align: left; vertical-align: top; font-weight: inherit; }
thead th { background: var(--panel); color: var(--soft); font-size: 0.8rem; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
table code { white-space: nowrap; }
table.numbers td { white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.marked { background: var(--marked); }
tr.marked th, tr.marked td { color: var(--accent); font-weight: 650; }
dl { display: grid; grid-template-columns: 9.5rem 1fr; gap: 0.6rem 1.25rem; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; }
.pictures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem; margin: 1.5rem 0;
}
.pictures img { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: 10px; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.45rem; }
  dl { display: block; }
  dd { margin-bottom: 0.75rem; }
  ul.figures { grid-template-columns: minmax(0, 1fr); gap: 0.5rem; }
  th, td { padding: 0.45rem 0.6rem; }
  thead th { white-space: normal; }
  table.numbers tbody th { min-width: 8.5rem; }
}
@media print {
  main { max-width: none; padding: 0; }
  pre { white-space: pre-wrap; }
}
"""
