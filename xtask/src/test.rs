//! `cargo xtask test`: everything that the tests need, then all tests, then one line with the numbers.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use virtio_kfd_images::{BaseImage, Cache, Fetcher, packages, recipe};
use virtio_kfd_tests::artifacts::{AGENT_VARIABLE, PROGRAMS_VARIABLE, THUNK_VARIABLE};

use crate::report::{self, Tally};
use crate::thunk;
use crate::workspace::Workspace;

/// Names the C headers that the ABI crates are checked against, as directories separated by colons.
pub const HEADERS_VARIABLE: &str = "VIRTIO_KFD_HEADER_DIRS";

/// nextest's profile for these runs (`.config/nextest.toml`).
const PROFILE: &str = "xtask";

/// How many tests may fail and pass when they run once more (`retries` in `.config/nextest.toml`). Guests on an emulated CPU and several
/// processes share a machine with others; one test that depends on that is named, more of them are a defect.
const MOST_AGAIN: usize = 2;

/// Options of `cargo xtask test`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Download nothing; tests that need packages which are not in the cache are skipped.
    #[arg(long)]
    offline: bool,
    /// Use `cargo test` even where cargo-nextest is installed.
    #[arg(long)]
    cargo_test: bool,
    /// Arguments for the test runner: a filter, for example.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the tests; the answer is the exit status.
pub fn run(options: &Options) -> Result<i32> {
    let begin = Instant::now();
    let workspace = Workspace::find()?;
    let cache = Cache::open()?;
    fetch(&cache, options.offline)?;
    workspace.build()?;
    workspace.build_test_programs()?;
    let mut tally = Tally::default();
    let linked = thunk::link(&workspace).and_then(|_| thunk::siblings::link(&workspace));
    if let Err(error) = linked {
        println!("link-thunk: FAILED: {error:#}");
        tally.count(false);
    }
    let environment = environment(&workspace, &cache)?;
    tally.add(if !options.cargo_test && has_nextest(&workspace) {
        nextest(&workspace, &environment, &options.arguments)?
    } else {
        let mut command = workspace.cargo(&["test", "--workspace", "--no-fail-fast", "--all-targets"]);
        command.args(&options.arguments).args(["--", "--nocapture", "--test-threads=1"]);
        libtest(command.envs(environment.clone()))?
    });
    if options.arguments.is_empty() {
        let mut doc = workspace.cargo(&["test", "--workspace", "--no-fail-fast", "--doc"]);
        tally.add(libtest(doc.envs(environment))?);
    }
    for reason in &tally.reasons {
        println!("skipped: {reason}");
    }
    for test in &tally.again {
        println!("failed, and passed when it ran once more: {test}");
    }
    tally.allow_again(MOST_AGAIN);
    eprintln!("test: {:.0} s", begin.elapsed().as_secs_f64());
    println!("{tally}");
    Ok(i32::from(tally.failed > 0))
}

/// Fetches all package sets. A mirror that cannot be reached is said, and the tests that need it skip themselves.
fn fetch(cache: &Cache, offline: bool) -> Result<()> {
    let mut fetcher = Fetcher::new(cache, false);
    for set in recipe::all()?.into_keys() {
        if packages::offline(cache, &set).is_err()
            && !offline
            && let Err(error) = fetcher.ensure(&set)
        {
            eprintln!("test: without package set {set}: {error}");
        }
    }
    let [kernel, runtime] = BaseImage::sets()?;
    if let (Ok(kernel), Ok(runtime)) = (packages::offline(cache, &kernel), packages::offline(cache, &runtime))
    {
        BaseImage::ensure(cache, &kernel, &runtime)?;
    }
    Ok(())
}

/// The variables by which tests find what was built and fetched.
fn environment(workspace: &Workspace, cache: &Cache) -> Result<Vec<(String, PathBuf)>> {
    let mut variables = vec![
        (PROGRAMS_VARIABLE.to_owned(), workspace.programs()),
        (THUNK_VARIABLE.to_owned(), workspace.thunk()),
        (AGENT_VARIABLE.to_owned(), workspace.agent()),
    ];
    for set in recipe::all()?.into_keys() {
        if let Ok(found) = packages::offline(cache, &set) {
            // VIRTIO_KFD_ROCM_TRIXIE and so on: the root of an unpacked set.
            variables.push((format!("VIRTIO_KFD_{}", set.to_uppercase().replace('-', "_")), found.root()));
        }
    }
    if let Some(headers) = headers(cache)? {
        variables.push((HEADERS_VARIABLE.to_owned(), headers));
    }
    Ok(variables)
}

/// The include directories of all header sets in the cache, separated by colons.
pub fn headers(cache: &Cache) -> Result<Option<PathBuf>> {
    let mut directories = Vec::new();
    for set in recipe::all()?.into_keys().filter(|set| set.starts_with("headers-")) {
        if let Ok(found) = packages::offline(cache, &set) {
            directories.push(found.root().join("usr/include"));
        }
    }
    if directories.is_empty() {
        return Ok(None);
    }
    let joined = std::env::join_paths(directories).context("a cache directory with a colon in its path")?;
    Ok(Some(joined.into()))
}

fn has_nextest(workspace: &Workspace) -> bool {
    let mut command = workspace.cargo(&["nextest", "--version"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn nextest(workspace: &Workspace, environment: &[(String, PathBuf)], arguments: &[String]) -> Result<Tally> {
    // nextest's store lies in the workspace, wherever cargo's target directory is.
    let report = workspace.root().join("target/nextest").join(PROFILE).join("junit.xml");
    // One of an earlier run must not be taken for this one's.
    if report.exists() {
        std::fs::remove_file(&report).with_context(|| format!("remove {}", report.display()))?;
    }
    let mut command = workspace.cargo(&["nextest", "run", "--workspace", "--profile", PROFILE]);
    command.args(arguments).envs(environment.iter().cloned());
    let status = command.status().context("start cargo nextest")?;
    let text = std::fs::read_to_string(&report)
        .with_context(|| format!("cargo nextest ({status}) left no report at {}", report.display()))?;
    let mut tally = report::junit(&text)?;
    if !status.success() && tally.failed == 0 {
        tally.count(false);
    }
    Ok(tally)
}

/// Runs `cargo test`, passes its output on, and counts.
fn libtest(command: &mut Command) -> Result<Tally> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("start cargo test")?;
    let mut text = String::new();
    if let Some(pipe) = child.stdout.take() {
        for line in BufReader::new(pipe).lines() {
            let line = line.context("output of cargo test")?;
            println!("{line}");
            text.push_str(&line);
            text.push('\n');
        }
    }
    let status = child.wait().context("wait for cargo test")?;
    let mut tally = report::libtest(&text);
    if !status.success() && tally.failed == 0 {
        tally.count(false);
    }
    Ok(tally)
}
