// Only in a page that is served: asks for newer numbers every two seconds, and draws them without losing what was chosen.
// Nothing changes under the hands of somebody who does something with it.

const live = document.getElementById('nav').parentElement.insertBefore(make('span', { id: 'live', class: 'small soft', role: 'status' }), button);
let waiting = null;

const labelOf = (select) => select.parentElement.firstChild.textContent;
const titleOf = (summary) => summary.textContent.replace(/\(.*/, ''); // without counts, which grow
// Who looks at the newest step's completions has not chosen a step, but to see the newest.
const isNewestStep = (select) => select.closest('#completions') && labelOf(select) === 'Step' && select.selectedIndex === select.options.length - 1;

// What somebody has chosen, in the words that the page has for it: numbers of steps and problems change.
function chosen() {
  return {
    selects: [...main.querySelectorAll('label > select')].filter((select) => !isNewestStep(select))
      .map((select) => [select.closest('section').id, labelOf(select), select.selectedOptions[0]?.text]),
    open: [...main.querySelectorAll('details[open] > summary')].map(titleOf),
    search: main.querySelector('input[type=search]')?.value,
    height: scrollY,
  };
}

function choose({ selects, open, search, height }) {
  for (const [room, label, text] of selects) {
    const select = [...main.querySelectorAll(`#${room} label > select`)].find((one) => labelOf(one) === label);
    const option = select && [...select.options].find((one) => one.text === text);
    if (!option || option.selected) continue;
    select.value = option.value;
    select.dispatchEvent(new Event('change'));
  }
  for (const summary of main.querySelectorAll('details > summary')) if (open.includes(titleOf(summary))) summary.parentElement.open = true;
  const box = main.querySelector('input[type=search]');
  if (box && search) { box.value = search; box.dispatchEvent(new Event('input')); }
  scrollTo(0, height);
}

function redraw(newer) {
  const kept = chosen();
  data = newer;
  forgetCharts();
  build();
  choose(kept);
  waiting = null;
}

// A control has the focus, a slider says what if, or text is selected.
const inUse = () => (main.contains(document.activeElement) && document.activeElement !== main)
  || Boolean(main.querySelector('.reset:not(:disabled)')) || (!getSelection().isCollapsed && main.contains(getSelection().anchorNode));
const newestStep = (of) => Math.max(0, ...of.runs.map((run) => run.steps || 0));

async function look() {
  try {
    const answer = await fetch(`data?since=${(waiting || data).version}`, { cache: 'no-store' });
    if (!answer.ok) throw new Error(await answer.text());
    if (answer.status === 200) waiting = parsed(await answer.text());
    if (waiting && !inUse()) redraw(waiting);
    live.textContent = waiting ? `step ${newestStep(waiting)} is in, and shown when you are done here` : `live · step ${newestStep(data)}`;
  } catch (error) {
    live.textContent = `not live: ${error instanceof TypeError ? 'the server does not answer' : error.message}`;
  }
  setTimeout(look, 2000);
}
look();
