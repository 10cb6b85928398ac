// A reader's way through the built site (docs/: npm run build), in a headless Chromium: two chapters beside their code,
// what changed since the step before, search, dark and light, a phone. Any message on the browser's console fails it.
//
//     node tests/site/click_path.mjs [FOLDER FOR SCREENSHOTS]
//
// Chromium is the program in $CHROMIUM, or chromium, chromium-browser or google-chrome of the PATH.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { existsSync, mkdirSync, readFileSync, statSync } from 'node:fs'
import { createServer } from 'node:http'
import { createRequire } from 'node:module'
import { dirname, extname, join, normalize, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'

const root = resolve(dirname(fileURLToPath(import.meta.url)), '../..')
const dist = join(root, 'docs/.vitepress/dist')
const { chromium } = createRequire(join(root, 'docs/package.json'))('playwright-core')
const screenshots = process.argv[2]
if (screenshots) mkdirSync(screenshots, { recursive: true })

function browserProgram() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM
  for (const name of ['chromium', 'chromium-browser', 'google-chrome']) {
    try {
      return execFileSync('sh', ['-c', `command -v ${name}`], { encoding: 'utf8' }).trim()
    } catch {}
  }
  throw new Error('no Chromium: apt-get install chromium, or say where it is in $CHROMIUM')
}

// ---- The site, served as files
const kinds = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.json': 'application/json', '.svg': 'image/svg+xml', '.woff2': 'font/woff2' }
const server = createServer((request, response) => {
  const path = join(dist, normalize(decodeURIComponent(new URL(request.url, 'http://localhost').pathname)))
  const file = [path, `${path}.html`, join(path, 'index.html')].find((each) => existsSync(each) && statSync(each).isFile())
  response.writeHead(file ? 200 : 404, { 'content-type': kinds[extname(file ?? '')] ?? 'text/plain; charset=utf-8' })
  response.end(file ? readFileSync(file) : 'not found')
})
await new Promise((listening) => server.listen(0, '127.0.0.1', listening))
const site = `http://127.0.0.1:${server.address().port}`

const browser = await chromium.launch({ executablePath: browserProgram(), args: ['--no-sandbox'] })
const page = await browser.newPage({ viewport: { width: 1600, height: 900 } })
const messages = []
page.on('console', (message) => ['error', 'warning'].includes(message.type()) && messages.push(message.text()))
page.on('pageerror', (error) => messages.push(String(error)))
page.on('response', (response) => response.status() >= 400 && messages.push(`${response.status()} ${response.url()}`))

const shot = async (name) => screenshots && page.screenshot({ path: join(screenshots, `${name}.png`) })
const pane = page.locator('.source-pane')

/** The file in the pane, and whether the highlighted lines are in view. */
const shown = () =>
  page.evaluate(() => {
    const body = document.querySelector('.source-pane .body').getBoundingClientRect()
    const rows = [...document.querySelectorAll('.source-pane .row.here')]
    const top = rows[0]?.getBoundingClientRect()
    return {
      path: document.querySelector('.source-pane .path').textContent,
      text: rows.map((row) => row.querySelector('code').textContent).join('\n'),
      lines: rows.map((row) => Number(row.dataset.line)),
      inView: Boolean(top) && top.top >= body.top && top.bottom <= body.bottom
    }
  })

/** Scrolls a text of the page to where it is read; waits until the pane shows this file and code. */
async function read(text, path, code) {
  await page.waitForFunction((text) => {  // after a click the address changes before the page does
    const item = [...document.querySelectorAll('.vp-doc li, .vp-doc p')].find((each) => each.textContent.includes(text))
    // A little above the line at which the pane turns.
    if (item) scrollTo(0, item.getBoundingClientRect().top + scrollY - innerHeight * 0.38)
    return item !== undefined
  }, text)
  await page.waitForFunction(
    ([path, code]) =>
      document.querySelector('.source-pane .path')?.textContent === path &&
      [...document.querySelectorAll('.source-pane .row.here')].some((row) => row.textContent.includes(code)),
    [path, code]
  )
  await page.waitForTimeout(700)  // the pane scrolls smoothly
  const now = await shown()
  assert.equal(now.path, path)
  assert.ok(now.inView, `the lines about "${text}" are in view`)
  const source = readFileSync(join(root, path), 'utf8').split('\n')
  assert.equal(now.text, now.lines.map((line) => source[line - 1]).join('\n'), 'the pane shows the file')
  return now
}

try {
  // ---- From the first page to a chapter
  await page.goto(site)
  await shot('home')
  await page.getByRole('link', { name: 'page', exact: true }).nth(4).click()
  await page.waitForURL('**/docs/05_kernel_fusion.html')
  await pane.waitFor()
  assert.match(await page.locator('h1').textContent(), /05 Kernel fusion/)
  await shot('05')

  // ---- The pane follows the text, from region to region and from file to file
  await read('Line 9, scores', 'steps/05_kernel_fusion/algorithm1.cu', 'Line 9, scores')
  await shot('05_line_9')
  await read('Online softmax with one', 'steps/05_kernel_fusion/forward.cu', 'float shrink')
  await read('a thread’s columns come in fours'.replace('’', "'"), 'steps/05_kernel_fusion/register_tiled.cu', 'drop.words')
  await shot('05_dropout')
  await read('Line 9, scores', 'steps/05_kernel_fusion/algorithm1.cu', 'Line 9, scores')

  // ---- What changed since the step before
  await read('What a warp carries', 'steps/05_kernel_fusion/forward.cu', 'float m[kRows]')
  assert.equal(await pane.locator('.row.new').count(), 0)
  await pane.getByText('what changed since algorithm1.cu').click()
  await pane.locator('.row.new').first().waitFor()
  assert.ok((await pane.locator('.row.gone').allTextContents()).some((line) => line.includes('// line 13')))
  assert.ok((await pane.locator('.row.new').allTextContents()).some((line) => line.includes('float m[kRows], l[kRows]')))
  assert.ok((await pane.locator('.row.equal').count()) > 0)
  await shot('05_changes')
  await pane.getByText('the file').click()
  await pane.getByRole('button', { name: 'register_tiled.cu' }).click()
  assert.equal((await shown()).path, 'steps/05_kernel_fusion/register_tiled.cu')

  // ---- Dark and light
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor)
  const light = await background()
  await page.locator('.VPNavBarAppearance .VPSwitchAppearance').click()
  assert.notEqual(await background(), light)
  await page.waitForTimeout(300)
  await shot('05_dark')
  await page.locator('.VPNavBarAppearance .VPSwitchAppearance').click()
  assert.equal(await background(), light)

  // ---- Search leads to a section of another chapter
  await page.locator('.VPNavBarSearch button').first().click()
  await page.locator('.VPLocalSearchBox input').fill('swizzle')
  await page.locator('.VPLocalSearchBox .result').first().waitFor()
  await shot('search')
  const results = await page.locator('.VPLocalSearchBox .result').allTextContents()
  assert.ok(results.some((result) => /07 Warp partitioning|Swizzle/.test(result)), results.join('; '))
  await page.keyboard.press('Escape')

  // ---- A second chapter, by the menu
  await page.locator('.VPNavBarMenu').getByRole('button', { name: 'Chapters' }).hover()
  await page.getByRole('link', { name: /^08 Hopper/ }).click()
  await page.waitForURL('**/docs/08_hopper_async.html')
  await read('an arrival from each warp, after'.replace('an', 'An'), 'steps/08_hopper_async/warp_specialized.cu', 'wait(s.k_full, turn)')
  await shot('08')
  await page.locator('a.region', { hasText: 'pingpong.cu' }).last().click()
  await page.waitForFunction(() => document.querySelector('.source-pane .path').textContent.endsWith('pingpong.cu'))
  await read('and only now P is packed', 'steps/08_hopper_async/overlapped.cu', 'pack_weights')
  await pane.getByText('what changed since pingpong.cu').click()
  await pane.locator('.row.new').first().waitFor()
  await shot('08_changes')
  await pane.getByText('the file').click()
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)
  assert.ok(wide <= 0, `the page is ${wide} px too wide`)

  // ---- An anchor as the pages write it
  await page.goto(`${site}/docs/05_kernel_fusion.html#the-papers-own-shape`)
  const heading = page.locator('[id="the-papers-own-shape"]')
  await heading.waitFor()

  // ---- A phone: the excerpts stand in the text, the files below it
  await page.setViewportSize({ width: 390, height: 844 })
  await page.goto(`${site}/docs/05_kernel_fusion.html`)
  await pane.locator('.row').first().waitFor()
  const place = await page.evaluate(() => {
    const box = (selector) => document.querySelector(selector).getBoundingClientRect()
    return { text: box('.vp-doc'), pane: box('.source-pane'), overflow: document.documentElement.scrollWidth - innerWidth }
  })
  assert.ok(place.pane.top >= place.text.bottom, 'the pane is below the text')
  assert.ok(place.overflow <= 0, `the page is ${place.overflow} px wider than the phone`)
  assert.ok(await page.locator(".region.excerpt + div[class*='language-']").first().isVisible())
  await shot('phone')
  await page.locator('text=Reading the code').first().scrollIntoViewIfNeeded()
  await page.evaluate(() => document.querySelector('#reading-the-code').scrollIntoView())
  await page.waitForTimeout(200)
  await shot('phone_code')
  await pane.scrollIntoViewIfNeeded()
  await page.evaluate(() => document.querySelector('.source-pane').scrollIntoView())
  await shot('phone_pane')

  assert.deepEqual(messages, [])
  console.log('the way through the site is as it should be')
} finally {
  await browser.close()
  server.close()
}
