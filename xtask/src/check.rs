//! `cargo xtask check`: what must hold besides the tests.

use std::process::Stdio;

use anyhow::{Result, bail};
use virtio_kfd_images::{Cache, Fetcher, recipe};

use crate::report::Tally;
use crate::test::{HEADERS_VARIABLE, headers};
use crate::workspace::{Workspace, run as run_command};
use crate::{direction, docs, hygiene, licences, links, thunk, variables};

/// Options of `cargo xtask check`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only these checks; all of them when none is named.
    #[arg(value_parser = names())]
    only: Vec<String>,
}

/// What a check came to.
enum Verdict {
    Holds,
    Skipped(String),
}

type Check = fn(&Workspace) -> Result<Verdict>;

/// All checks, the quick ones first.
const CHECKS: &[(&str, Check)] = &[
    ("fmt", fmt),
    ("direction", direction),
    ("hygiene", hygiene),
    ("variables", variables),
    ("links", links),
    ("licences", licences),
    ("advisories", advisories),
    ("clippy", clippy),
    ("docs", docs),
    ("abi", abi),
    ("exports", exports),
];

fn names() -> clap::builder::PossibleValuesParser {
    CHECKS.iter().map(|(name, _)| *name).collect::<Vec<_>>().into()
}

/// Runs the checks; the answer is the exit status.
pub fn run(options: &Options) -> Result<i32> {
    let workspace = Workspace::find()?;
    let mut tally = Tally::default();
    for (name, check) in CHECKS {
        if !options.only.is_empty() && !options.only.iter().any(|wanted| wanted == name) {
            continue;
        }
        eprintln!("check: {name}");
        match check(&workspace) {
            Ok(Verdict::Holds) => {
                println!("check {name}: ok");
                tally.count(true);
            }
            Ok(Verdict::Skipped(reason)) => {
                println!("check {name}: skipped: {reason}");
                tally.skipped += 1;
            }
            Err(error) => {
                println!("check {name}: FAILED: {error:#}");
                tally.count(false);
            }
        }
    }
    println!("{tally}");
    Ok(i32::from(tally.failed > 0))
}

fn fmt(workspace: &Workspace) -> Result<Verdict> {
    run_command(&mut workspace.cargo(&["fmt", "--all", "--check"])).map(|()| Verdict::Holds)
}

fn clippy(workspace: &Workspace) -> Result<Verdict> {
    let mut command = workspace.cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    run_command(&mut command).map(|()| Verdict::Holds)
}

fn docs(workspace: &Workspace) -> Result<Verdict> {
    docs::check(workspace).map(|()| Verdict::Holds)
}

fn direction(workspace: &Workspace) -> Result<Verdict> {
    none(&direction::breaches(workspace.root())?)
}

fn hygiene(workspace: &Workspace) -> Result<Verdict> {
    if let Err(error) = hygiene::possible(workspace.root()) {
        return Ok(Verdict::Skipped(format!("{error:#}")));
    }
    none(&hygiene::findings(workspace.root())?)
}

/// Every environment variable is described once.
fn variables(workspace: &Workspace) -> Result<Verdict> {
    if let Err(error) = hygiene::possible(workspace.root()) {
        return Ok(Verdict::Skipped(format!("{error:#}")));
    }
    none(&variables::findings(workspace.root())?)
}

/// Links of the documents lead somewhere.
fn links(workspace: &Workspace) -> Result<Verdict> {
    if let Err(error) = hygiene::possible(workspace.root()) {
        return Ok(Verdict::Skipped(format!("{error:#}")));
    }
    none(&links::findings(workspace.root())?)
}

fn licences(workspace: &Workspace) -> Result<Verdict> {
    if has_deny(workspace) {
        let mut command = workspace.cargo(&["deny", "check", "licenses", "bans", "sources"]);
        return run_command(&mut command).map(|()| Verdict::Holds);
    }
    none(&licences::breaches(workspace.root())?)
}

fn advisories(workspace: &Workspace) -> Result<Verdict> {
    if !has_deny(workspace) {
        return Ok(Verdict::Skipped("cargo-deny is not installed".to_owned()));
    }
    let mut fetch = workspace.cargo(&["deny", "fetch", "db"]);
    if !fetch.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        return Ok(Verdict::Skipped("the advisory database cannot be had".to_owned()));
    }
    run_command(&mut workspace.cargo(&["deny", "check", "--disable-fetch", "advisories"]))
        .map(|()| Verdict::Holds)
}

fn has_deny(workspace: &Workspace) -> bool {
    let mut command = workspace.cargo(&["deny", "--version"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The ABI crates against the C headers of each Debian release.
fn abi(workspace: &Workspace) -> Result<Verdict> {
    let cache = Cache::open()?;
    if let Err(error) = fetch(&cache, |set| set.starts_with("headers-")) {
        return Ok(Verdict::Skipped(format!("{error:#}")));
    }
    let Some(headers) = headers(&cache)? else { bail!("no package set with headers") };
    let mut command = workspace.cargo(&["test", "-p", "kfd-abi", "-p", "hsakmt-abi", "--tests"]);
    run_command(command.env(HEADERS_VARIABLE, headers)).map(|()| Verdict::Holds)
}

/// Our libhsakmt.so.1 exports all that Debian's do.
fn exports(workspace: &Workspace) -> Result<Verdict> {
    run_command(&mut workspace.cargo(&["build", "--release", "-p", "guest-thunk"]))?;
    thunk::link(workspace)?;
    let cache = Cache::open()?;
    if let Err(error) = fetch(&cache, |set| thunk::REPLACED.contains(&set)) {
        return Ok(Verdict::Skipped(format!("{error:#}")));
    }
    let missing: Vec<String> = thunk::missing_exports(workspace, &cache)?
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(set, names)| format!("{set}: missing {}", names.join(", ")))
        .collect();
    none(&missing)
}

/// Fetches the sets whose names are `wanted`.
fn fetch(cache: &Cache, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let mut fetcher = Fetcher::new(cache, false);
    for set in recipe::all()?.into_keys().filter(|set| wanted(set)) {
        fetcher.ensure(&set)?;
    }
    Ok(())
}

/// Success if there is nothing to complain about.
fn none(complaints: &[String]) -> Result<Verdict> {
    if complaints.is_empty() {
        return Ok(Verdict::Holds);
    }
    bail!("\n  {}", complaints.join("\n  "))
}
