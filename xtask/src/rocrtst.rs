//! `cargo xtask rocrtst`: ROCr's own tests, as Debian builds them, natively on the model and in loop-back, test by test.
//!
//! The runtime has AMD's thunk inside, so our stack is `libkfd_preload.so` under it.

mod causes;
mod page;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use virtio_kfd_images::{Cache, Fetcher, PackageSet, tool};
use virtio_kfd_tests::rocrtst::{RUNTIME, TESTS};
use virtio_kfd_tests::{Artifacts, Rocrtst, Under};

use self::page::About;
use crate::gtest::output::Outcome;
use crate::gtest::rows::{Row, summary};
use crate::gtest::{Bench, show, when};
use crate::stack::{self, SharedStack};
use crate::workspace::Workspace;

/// The page that `--write` writes.
const PAGE: &str = "docs/rocrtst.md";

/// The tests' package, and the package that must have its version.
const TESTS_PACKAGE: &str = "libhsa-runtime64-tests";
const RUNTIME_PACKAGE: &str = "libhsa-runtime64-1";

/// How long the daemon may live: for one test after another, each with its limit.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// How many times the native limit a test may take on our stack.
const PATIENCE: u32 = 2;

/// Options of `cargo xtask rocrtst`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Which tests: a filter of googletest, for example 'rocrtstFunc.*'. Disabled tests are among them.
    #[arg(long, default_value = "*")]
    filter: String,
    /// GPU profile of the model: a name, or a path of a profile's file.
    #[arg(long, default_value = "gfx906", value_parser = stack::profile)]
    profile: String,
    /// Seconds that each test may take natively; on our stack it may take twice as long if it ends natively.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    limit: u64,
    /// How many tests run at a time, each place by itself.
    #[arg(long, default_value_t = 1, value_parser = jobs)]
    jobs: usize,
    /// Write docs/rocrtst.md.
    #[arg(long)]
    write: bool,
    /// Keep what the tests print in this directory, a file for each test and place.
    #[arg(long)]
    logs: Option<PathBuf>,
}

/// How many tests may run at a time.
fn jobs(text: &str) -> Result<usize> {
    let jobs = text.parse()?;
    ensure!((1..=64).contains(&jobs), "{jobs} tests at a time: 1 to 64 can be");
    Ok(jobs)
}

/// Runs the tests; the status is 1 if one passes natively and not on our stack, or does not pass natively for no known reason.
pub fn run(options: &Options) -> Result<i32> {
    tool::require(&["cc", "date", "git"])?;
    let workspace = Workspace::find()?;
    let cache = Cache::open()?;
    let mut fetcher = Fetcher::new(&cache, false);
    let (tests, runtime) = (fetcher.ensure(TESTS)?, fetcher.ensure(RUNTIME)?);
    let version = version(&tests, TESTS_PACKAGE)?;
    let found = self::version(&runtime, RUNTIME_PACKAGE)?;
    ensure!(
        version == found,
        "{TESTS_PACKAGE} is of version {version}, {RUNTIME_PACKAGE} of {found}: the suite has moved on; \
         `cargo xtask packages --refresh {TESTS} {RUNTIME}` fetches what it has now"
    );
    workspace.build_for_host()?;
    let (date, commit) = when(workspace.root())?;
    let about = About {
        date,
        commit,
        version,
        filter: options.filter.clone(),
        profile: options.profile.clone(),
        limit: options.limit,
        jobs: options.jobs,
        patience: PATIENCE,
    };
    let artifacts = Artifacts::of_workspace(workspace.target(), &cache);
    let new = || Runner::new(&artifacts, &tests, &runtime, options);
    let names = new()?.list()?;
    ensure!(!names.is_empty(), "rocrtst64 has no test that matches {}", options.filter);
    let native = shared(options.jobs, &names, &new, |runner, test, _| runner.native(test))?;
    let loopback = shared(options.jobs, &names, &new, |runner, test, index| {
        let limit = native.get(index).map(|native| runner.bench.limit_after(native, PATIENCE));
        runner.loopback(test, limit.unwrap_or(runner.bench.limit()))
    })?;
    let rows: Vec<Row> = names
        .into_iter()
        .zip(native.into_iter().zip(loopback))
        .map(|(test, (native, loopback))| Row { test, native, loopback, guest: None })
        .collect();
    show(workspace.root(), PAGE, &page::page(&about, &rows), options.write)?;
    eprintln!("rocrtst: {}", summary(&rows));
    let worse = |row: &Row| row.is_worse() && !page::is_flaky(&row.test);
    let unexplained = |row: &Row| causes::is_unexplained(row) && !page::is_flaky(&row.test);
    for row in rows.iter().filter(|row| unexplained(row)) {
        eprintln!("rocrtst: {row}: not explained (xtask/src/rocrtst/causes.rs)");
    }
    Ok(i32::from(rows.iter().any(|row| worse(row) || unexplained(row))))
}

/// The outcome of each test, in order. `jobs` threads share the tests; each has a runner of its own.
fn shared<'a>(
    jobs: usize,
    names: &[String],
    new: &(impl Fn() -> Result<Runner<'a>> + Sync),
    run: impl Fn(&mut Runner<'a>, &str, usize) -> Result<Outcome> + Sync,
) -> Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, Outcome)>> {
        let mut runner = new()?;
        let mut outcomes = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(test) = names.get(index) else { return Ok(outcomes) };
            let outcome = run(&mut runner, test, index)?;
            eprintln!("rocrtst: {test}: {outcome} {}", outcome.note());
            outcomes.push((index, outcome));
        }
    };
    let mut outcomes = std::thread::scope(|scope| -> Result<Vec<(usize, Outcome)>> {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let mut outcomes = Vec::new();
        for thread in threads {
            outcomes.extend(thread.join().map_err(|_| anyhow!("a thread that runs tests has panicked"))??);
        }
        Ok(outcomes)
    })?;
    outcomes.sort_by_key(|(index, _)| *index);
    Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
}

/// The version of a package in a set.
fn version(set: &PackageSet, package: &str) -> Result<String> {
    let packages = set.manifest()?;
    let found = packages.into_iter().find(|found| found.name == package);
    found
        .map(|found| found.version)
        .with_context(|| format!("no package {package} in {}", set.root().display()))
}

/// Runs single tests in each place.
struct Runner<'a> {
    artifacts: &'a Artifacts,
    options: &'a Options,
    rocrtst: Rocrtst,
    bench: Bench<'a>,
    /// The VM, so that several processes of a test are processes of one guest, and its daemon; new ones are started after a
    /// test that did not pass, so that none has to do with another.
    stack: Option<SharedStack>,
}

impl<'a> Runner<'a> {
    fn new(
        artifacts: &'a Artifacts,
        tests: &PackageSet,
        runtime: &PackageSet,
        options: &'a Options,
    ) -> Result<Self> {
        let bench = Bench::new("rocrtst", options.logs.as_deref(), options.limit)?;
        let rocrtst = Rocrtst::new(&tests.root(), &runtime.root(), bench.directory())?;
        Ok(Self { artifacts, options, rocrtst, bench, stack: None })
    }

    /// The names of the tests.
    fn list(&self) -> Result<Vec<String>> {
        let under = Under::model(self.artifacts, &self.options.profile)?;
        self.bench.names(self.rocrtst.command(&under, &self.options.filter)?, true)
    }

    fn native(&self, test: &str) -> Result<Outcome> {
        let under = Under::model(self.artifacts, &self.options.profile)?;
        self.test(&under, test, "native", self.bench.limit())
    }

    fn loopback(&mut self, test: &str, limit: Duration) -> Result<Outcome> {
        let stack = match self.stack.take() {
            Some(stack) => stack,
            None => SharedStack::start(self.artifacts, &self.options.profile, LIFE)?,
        };
        let under = Under::seam(self.artifacts, stack.socket())?;
        let outcome = self.test(&under, test, "loop-back", limit)?;
        match &outcome {
            Outcome::Passed | Outcome::Skipped(_) => self.stack = Some(stack),
            _ => self.bench.keep(test, "daemon", &stack.report())?,
        }
        Ok(outcome)
    }

    fn test(&self, under: &Under<'_>, test: &str, place: &str, limit: Duration) -> Result<Outcome> {
        let command = self.rocrtst.command(under, test)?;
        self.bench.outcome(command, test, place, limit)
    }
}
