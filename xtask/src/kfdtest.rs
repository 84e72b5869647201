//! `cargo xtask kfdtest`: a kfdtest binary that the user has built, natively on the model and in loop-back, test by test.

mod page;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use virtio_kfd_images::{BaseImage, Cache, Fetcher, tool};
use virtio_kfd_tests::{Artifacts, Guest, Vm, guest};

use self::page::About;
use crate::gtest::output::{self, End, Outcome};
use crate::gtest::rows::{Row, summary};
use crate::gtest::{Bench, show, when};
use crate::stack::{self, SharedStack, Stack};
use crate::thunk;
use crate::workspace::Workspace;

/// The page that `--write` writes.
const PAGE: &str = "docs/kfdtest.md";

/// How long daemons and guests may live: for one test after another, each with its limit.
const LIFE: Duration = Duration::from_secs(24 * 3600);

/// How many times the native limit a test may take on our stack.
const PATIENCE: u32 = 3;

/// Where the binary lies in the guest.
const GUEST_BINARY: &str = "usr/bin/kfdtest";

/// Opts in to pages of HDP flush registers (docs/limits.md).
const HDP: (&str, &str) = ("VIRTIO_KFD_HDP", "trap");

/// Memory of the guest: kfdtest takes buffers of a quarter of it, and 65 compute queues at once, each of which has a save area
/// of 20 MiB; the image lies in it too.
const GUEST_MIB: u32 = 3072;

/// Opts in to the registration of application memory, variables included (docs/limits.md).
const REGISTER: (&str, &str) = ("VIRTIO_KFD_REGISTER", "adopt-variables");

/// Options of `cargo xtask kfdtest`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The kfdtest binary, linked dynamically to libhsakmt.so.1 of the release that the guest library stands in for (6.2).
    #[arg(long)]
    binary: PathBuf,
    /// Which tests: a filter of googletest, for example 'KFDMemoryTest.*:KFDIPCTest.*'.
    #[arg(long, default_value = "*")]
    filter: String,
    /// GPU profile of the model: a name, or a path of a profile's file.
    #[arg(long, default_value = "gfx906", value_parser = stack::profile)]
    profile: String,
    /// Seconds that each test may take natively; on our stack, whose guest's CPU may be an emulated one, it may take
    /// three times as long if it ends natively.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    limit: u64,
    /// Run the tests in a QEMU guest as well.
    #[arg(long)]
    guest: bool,
    /// Write docs/kfdtest.md; needs --about.
    #[arg(long, requires = "about")]
    write: bool,
    /// Where the binary is from and how it was built, in words, for the page.
    #[arg(long)]
    about: Option<String>,
    /// Keep what the tests print in this directory, a file for each test and place.
    #[arg(long)]
    logs: Option<PathBuf>,
}

/// Runs the tests; the status is 1 if one passes natively and not on our stack.
pub fn run(options: &Options) -> Result<i32> {
    tool::require(&["date", "git"])?;
    let binary = std::path::absolute(&options.binary).context("the path of the binary")?;
    ensure!(binary.is_file(), "{} is no file", binary.display());
    let binary = binary.to_str().context("the path of the binary is not UTF-8")?;
    let workspace = Workspace::find()?;
    let cache = Cache::open()?;
    Fetcher::new(&cache, false).ensure("rocm-trixie")?;
    if options.guest {
        for set in BaseImage::sets()?.iter().map(String::as_str).chain(["qemu"]) {
            Fetcher::new(&cache, false).ensure(set)?;
        }
    }
    workspace.build()?;
    thunk::link(&workspace)?;
    let (date, commit) = when(workspace.root())?;
    let about = About {
        date,
        commit,
        binary: options.about.clone().unwrap_or_default(),
        filter: options.filter.clone(),
        profile: options.profile.clone(),
        limit: options.limit,
    };
    let artifacts = Artifacts::of_workspace(workspace.target(), &cache);
    let mut runner = Runner::new(&artifacts, binary, options)?;
    let tests = runner.list()?;
    ensure!(!tests.is_empty(), "the binary has no test that matches {}", options.filter);
    let mut rows = Vec::new();
    for test in tests {
        let native = runner.native(&test)?;
        let limit = runner.bench.limit_after(&native, PATIENCE);
        let loopback = runner.loopback(&test, limit)?;
        let guest = if options.guest { Some(runner.guest(&test, limit)?) } else { None };
        let row = Row { test, native, loopback, guest };
        eprintln!("kfdtest: {row}");
        rows.push(row);
    }
    show(workspace.root(), PAGE, &page::page(&about, &rows), options.write)?;
    eprintln!("kfdtest: {}", summary(&rows));
    Ok(i32::from(rows.iter().any(Row::is_worse)))
}

/// A guest on a daemon of its own.
struct Machine {
    guest: Guest,
    stack: Stack,
}

impl Machine {
    fn start(artifacts: &Artifacts, profile: &str, binary: &str) -> Result<Self> {
        let stack = Stack::start(artifacts, profile, LIFE)?;
        let mut builder = Vm::builder(artifacts)?.memory_mib(GUEST_MIB).limit(LIFE);
        builder.overlay().file(GUEST_BINARY, Path::new(binary))?;
        let booted = builder.module("amdgpu").vhost_user_gpu(&stack.socket()).boot();
        let guest = booted.map_err(|error| error.context(stack.report()))?;
        Ok(Self { guest, stack })
    }
}

/// Runs single tests in each place.
struct Runner<'a> {
    artifacts: &'a Artifacts,
    binary: &'a str,
    options: &'a Options,
    bench: Bench<'a>,
    /// The VM, so that several processes of a test are processes of one guest, and its daemon; new ones are started after a
    /// test that did not pass, so that none has to do with another.
    stack: Option<SharedStack>,
    /// The guest and its daemon; new ones are started when the guest has gone away or a test in it passed its limit.
    machine: Option<Machine>,
}

impl<'a> Runner<'a> {
    fn new(artifacts: &'a Artifacts, binary: &'a str, options: &'a Options) -> Result<Self> {
        let bench = Bench::new("kfdtest", options.logs.as_deref(), options.limit)?;
        Ok(Self { artifacts, binary, options, bench, stack: None, machine: None })
    }

    /// The names of the tests.
    fn list(&self) -> Result<Vec<String>> {
        let mut command = stack::native(self.artifacts, &self.options.profile, self.binary)?;
        command.arg(format!("--gtest_filter={}", self.options.filter));
        self.bench.names(command, false)
    }

    fn native(&self, test: &str) -> Result<Outcome> {
        let command = stack::native(self.artifacts, &self.options.profile, self.binary)?;
        self.test(command, test, "native", self.bench.limit())
    }

    fn loopback(&mut self, test: &str, limit: Duration) -> Result<Outcome> {
        let stack = match self.stack.take() {
            Some(stack) => stack,
            None => SharedStack::start(self.artifacts, &self.options.profile, LIFE)?,
        };
        let mut command = stack::loopback(self.artifacts, stack.socket(), self.binary)?;
        command.env(REGISTER.0, REGISTER.1);
        command.env(HDP.0, HDP.1);
        let outcome = self.test(command, test, "loop-back", limit)?;
        match &outcome {
            Outcome::Passed | Outcome::Skipped(_) => self.stack = Some(stack),
            _ => self.bench.keep(test, "daemon", &stack.report())?,
        }
        Ok(outcome)
    }

    fn guest(&mut self, test: &str, limit: Duration) -> Result<Outcome> {
        let machine = match self.machine.take() {
            Some(machine) => machine,
            None => Machine::start(self.artifacts, &self.options.profile, self.binary)?,
        };
        let command = guest::Command::new(&format!("/{GUEST_BINARY}")).directory("/tmp").limit(limit);
        let command = command.env(REGISTER.0, REGISTER.1);
        let command = command.env(HDP.0, HDP.1);
        let output =
            machine.guest.run(&command.arg(&format!("--gtest_filter={test}")).arg("--gtest_color=no"));
        let output = match output {
            Ok(output) => output,
            Err(error) => {
                let text = format!("{error:#}\n{}\n{}", machine.guest.vm().report(), machine.stack.report());
                self.bench.keep(test, "guest", &text)?;
                return Ok(Outcome::Failed("the guest went away".to_owned()));
            }
        };
        let exit = output.exit;
        let end = match (exit.timed_out, exit.code) {
            (true, _) => End::Limit,
            (false, Some(code)) => End::Status(code),
            (false, None) => End::Signal(exit.signal.unwrap_or(0)),
        };
        let text = format!("{}{}", output.text(), String::from_utf8_lossy(&output.stderr));
        self.bench.keep(test, "guest", &text)?;
        let outcome = output::outcome(test, &text, end);
        match &outcome {
            Outcome::Passed | Outcome::Skipped(_) => {}
            _ => self.bench.keep(test, "guest-daemon", &machine.stack.report())?,
        }
        if end != End::Limit {
            self.machine = Some(machine);
        }
        Ok(outcome)
    }

    fn test(&self, mut command: Command, test: &str, place: &str, limit: Duration) -> Result<Outcome> {
        command.arg(format!("--gtest_filter={test}")).arg("--gtest_color=no");
        self.bench.outcome(command, test, place, limit)
    }
}
