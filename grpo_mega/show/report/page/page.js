// Puts the sections together. With several runs, the comparison and the curves are of all, the rest of the chosen one.

let data = parsed(document.getElementById('data').textContent);
const main = document.getElementById('main'), nav = document.getElementById('nav'), button = document.getElementById('theme');

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === 'dark' ? 'Light' : 'Dark';
  button.setAttribute('aria-label', `Use ${name === 'dark' ? 'light' : 'dark'} colours`);
  for (const element of document.querySelectorAll('[data-colour]')) element.style.background = colour(element.dataset.colour);
  redrawCharts(false);
  for (const draw of maps) draw();
}

function ofOneRun(run, many) {
  return [many ? null : curvesSection(data), explorerSection(run), timeSection(run), devicesSection(run), expertsSection(run), followedSection(run), settingsSection(run)].filter(Boolean);
}

function build() {
  if (data.runs.length === 1) {
    main.replaceChildren(summarySection(data.runs[0]), ...ofOneRun(data.runs[0], false));
  } else {
    const single = make('div');
    const show = (index) => { single.replaceChildren(...ofOneRun(data.runs[index], true)); };
    show(0);
    main.replaceChildren(...[comparisonSection(data), curvesSection(data)].filter(Boolean),
      section('run', 'One run', make('div', { class: 'bar' }, choice('Run', data.runs.map((run, index) => [index, run.name]), 0, (index) => show(Number(index)), true))), single);
  }
  const titles = { summary: 'Summary', comparison: 'Comparison', run: 'One run', curves: 'Curves', completions: 'Completions', time: 'Time', devices: 'Devices', experts: 'Experts', followed: 'Followed', settings: 'Settings' };
  nav.replaceChildren(...[...main.querySelectorAll('section[id]')].map(({ id }) => make('a', { href: `#${id}` }, titles[id])));
}

const dark = matchMedia('(prefers-color-scheme: dark)');
document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light';
build();
useTheme(theme());
dark.addEventListener('change', () => useTheme(dark.matches ? 'dark' : 'light'));
button.addEventListener('click', () => useTheme(theme() === 'dark' ? 'light' : 'dark'));
let onScreen = 'light';
addEventListener('beforeprint', () => { // paper is light, canvases included
  onScreen = theme();
  useTheme('light');
  for (const entry of charts) if (entry.plot.isConnected && entry.plot.clientWidth && !entry.drawn) draw(entry);
});
addEventListener('afterprint', () => useTheme(onScreen));
