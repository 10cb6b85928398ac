// What the site knows of the code: runs docs/book.py, and writes
//   .vitepress/book.json                which region of which file each page speaks of, in order
//   .vitepress/public/source/PAGE.json  for a page's right pane: its chapter's files, highlighted, and what changed
//   .vitepress/public/steps/…           the files themselves, where the pages' links lead
import { execFileSync } from 'node:child_process'
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { basename, dirname, join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { createCssVariablesTheme, createHighlighter } from 'shiki'

const here = dirname(fileURLToPath(import.meta.url))
const root = resolve(here, '../..')
const out = join(here, 'public')

execFileSync('python3', [join(root, 'docs/book.py'), '--site', join(here, 'book.json')], { stdio: 'inherit' })
const book = JSON.parse(readFileSync(join(here, 'book.json'), 'utf8'))

// ---- Highlighting: a line of HTML for each line of code, colours by class, so that one text serves dark and light
const theme = createCssVariablesTheme({ variablePrefix: '--' })
const highlighter = await createHighlighter({ themes: [theme], langs: ['cpp'] })
const escaped = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;')

function highlighted(text) {
  const { tokens } = highlighter.codeToTokens(text, { lang: 'cpp', theme: theme.name })
  return tokens.map((line) =>
    line
      .map(({ content, color }) => {
        const kind = color?.match(/--token-([\w-]+)/)?.[1]
        return kind && content.trim() ? `<i class="t-${kind}">${escaped(content)}</i>` : escaped(content)
      })
      .join('')
  )
}

// ---- A page's files: the chapter's steps in the order of the ladder, then whatever else the page shows
rmSync(out, { recursive: true, force: true })
mkdirSync(join(out, 'source'), { recursive: true })
const lines = {}
for (const [path, file] of Object.entries(book.files)) lines[path] = highlighted(file.text)

for (const [page, regions] of Object.entries(book.regions)) {
  const chapter = `steps/${basename(page, '.md')}/`
  const steps = Object.keys(book.files).filter((path) => path.startsWith(chapter) && book.files[path].step)
  steps.sort((a, b) => book.files[a].rung - book.files[b].rung)
  const files = [...new Set([...steps, ...regions.map(({ file }) => file)])]
  if (!steps.length) continue  // no chapter
  const entries = files.map((path) => {
    const { step, before, diff } = book.files[path]
    const removed = {}  // lines of the step before that are gone
    for (const [tag, from, to] of diff ?? [])
      if (tag === 'delete' || tag === 'replace')
        for (let line = from; line < to; line++) removed[line] = lines[before][line]
    return { path, step, lines: lines[path], before, diff, removed }
  })
  writeFileSync(join(out, 'source', `${basename(page, '.md')}.json`), JSON.stringify(entries))
}

// ---- What links lead to beside the pages
for (const folder of ['steps', 'reference_cpu', 'tests', 'docs/results'])
  cpSync(join(root, folder), join(out, folder), { recursive: true })
for (const file of ['LICENSE', 'CMakeLists.txt']) cpSync(join(root, file), join(out, file))
