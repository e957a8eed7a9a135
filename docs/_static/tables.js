// On a telephone each row of a table is a block (pages.css): its cells say which column they are of.
document.addEventListener('DOMContentLoaded', () => {
  for (const table of document.querySelectorAll('table.docutils')) {
    const names = [...table.querySelectorAll('thead th')].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll('tbody tr')) {
      [...row.children].forEach((cell, at) => cell.setAttribute('data-column', names[at] || ''));
    }
  }
});
