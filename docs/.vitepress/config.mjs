import { existsSync, readFileSync, readdirSync } from 'node:fs'
import { basename, dirname, join, posix, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'
import { defineConfig } from 'vitepress'

const here = dirname(fileURLToPath(import.meta.url))
const root = resolve(here, '../..')
const base = process.env.SITE_BASE ?? '/'  // where the site is served: /, or /name/
const book = JSON.parse(readFileSync(join(here, 'book.json'), 'utf8'))

// ---- The pages, by their headings: those with a number are chapters
const pages = readdirSync(join(root, 'docs'))
  .filter((name) => name.endsWith('.md'))
  .sort()
  .map((name) => ({
    text: readFileSync(join(root, 'docs', name), 'utf8').match(/^# (.+)$/m)[1],
    link: `/docs/${basename(name, '.md')}`,
    chapter: /^\d\d_/.test(name)
  }))
const chapters = pages.filter((page) => page.chapter)
const others = pages.filter((page) => !page.chapter)

// An anchor, as GitHub makes it (and docs/book.py): the pages' links hold in both places.
const slugify = (heading) => heading.trim().toLowerCase().replace(/[^\p{L}\p{N}_\- ]/gu, '').replaceAll(' ', '-')

// ---- Markdown
function withRegions(md) {
  // A line <!-- excerpt … -->, <!-- see … --> or <!-- without … --> becomes a mark that the right pane follows.
  // docs/book.py has found its region; marks and regions come in the same order.
  const htmlBlock = md.renderer.rules.html_block
  md.renderer.rules.html_block = (tokens, i, options, env, self) => {
    const kind = tokens[i].content.match(/^\s*<!-- (excerpt|see|without) .*-->\s*$/)?.[1]
    if (!kind) return htmlBlock(tokens, i, options, env, self)
    env.regionsSeen = (env.regionsSeen ?? -1) + 1
    const { file, first, last } = book.regions[env.relativePath === 'index.md' ? 'README.md' : env.relativePath][env.regionsSeen]
    const where = first === last ? `line ${first}` : `lines ${first}–${last}`
    return (
      ` <a class="region ${kind}" href="${base}${file}" target="_blank" data-file="${file}" data-first="${first}"` +
      ` data-last="${last}"><code>${basename(file)}</code> ${where}</a>\n`
    )
  }
  // Links to files that are no pages lead to the copies that prepare.mjs has made; folders have no page here.
  const linkOpen = md.renderer.rules.link_open ?? ((tokens, i, options, env, self) => self.renderToken(tokens, i, options))
  md.renderer.rules.link_open = (tokens, i, options, env, self) => {
    const href = tokens[i].attrGet('href')
    if (env.relativePath && !/^[a-z]+:|^#|\.md(#|$)|\.html(#|$)/.test(href)) {
      const path = posix.join(posix.dirname(env.relativePath), href)
      tokens[i].attrSet('href', `${base}${path}`)
      tokens[i].attrSet('target', '_blank')
      return self.renderToken(tokens, i, options)
    }
    return linkOpen(tokens, i, options, env, self)
  }
}

const icon = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#2b6cb0"/>
<path d="M3 3h3v3H3zM3 7h3v3H3zM7 7h3v3H7zM3 11h3v3H3zM7 11h3v3H7zM11 11h3v3h-3z" fill="#fff"/></svg>`  // a causal mask

export default defineConfig({
  title: 'FlashAttention, step by step',
  description: 'Exact attention, from a loop in Eigen to the fastest kernels for GPUs, one idea a chapter',
  base,
  head: [['link', { rel: 'icon', href: `data:image/svg+xml,${encodeURIComponent(icon)}` }]],
  srcDir: '../',
  srcExclude: ['{steps,tests,reference_cpu}/**', 'build*/**', '.*/**', 'docs/results/**', 'docs/.vitepress/**'],
  rewrites: { 'README.md': 'index.md' },
  cacheDir: join(here, 'cache'),
  outDir: join(here, 'dist'),
  markdown: {
    math: true,
    languageAlias: { cuda: 'cpp' },
    anchor: { slugify },
    config: withRegions
  },
  transformPageData(page) {
    const regions = book.regions[page.relativePath] ?? []
    if (!/^docs\/\d\d_/.test(page.relativePath) || !existsSync(join(here, 'public/source', `${basename(page.relativePath, '.md')}.json`)))
      return
    if (regions.length > 1) Object.assign(page.frontmatter, { pageClass: 'beside-code', sidebar: false, aside: false })
  },
  vite: {
    publicDir: join(here, 'public'),
    build: { chunkSizeWarningLimit: 2000 },
    // README.md lies outside the folder that has node_modules.
    plugins: [
      {
        name: 'vue-for-pages',
        enforce: 'pre',
        resolveId(id, importer, options) {
          if (/^vue(\/|$)/.test(id) && importer?.endsWith('.md'))
            return this.resolve(id, join(here, 'theme/index.js'), { ...options, skipSelf: true })
        }
      }
    ]
  },
  themeConfig: {
    search: { provider: 'local' },
    nav: [
      { text: 'Start here', link: chapters[0].link },
      { text: 'Chapters', items: chapters.slice(1).map(({ text, link }) => ({ text, link })) },
      { text: 'More', items: others.map(({ text, link }) => ({ text, link })) }
    ],
    sidebar: [
      { text: 'Chapters', items: chapters.map(({ text, link }) => ({ text, link })) },
      { text: 'More', items: others.map(({ text, link }) => ({ text, link })) }
    ],
    outline: [2, 3]
  }
})
