//! `cargo xtask docs`: the pages that are generated from code.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::workspace::Workspace;

/// Options of `cargo xtask docs`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only say whether the pages are current.
    #[arg(long)]
    check: bool,
}

/// Each page, and the example that prints it.
const PAGES: &[(&str, &str, &str)] = &[
    ("docs/protocol.md", "virtio-kfd-protocol", "protocol_page"),
    ("docs/coverage.md", "guest-thunk", "coverage"),
];

/// Writes the pages, or compares them.
pub fn run(options: &Options) -> Result<()> {
    let workspace = Workspace::find()?;
    if options.check {
        return check(&workspace);
    }
    for (page, package, example) in PAGES {
        let text = generate(&workspace, package, example)?;
        std::fs::write(workspace.root().join(page), text).with_context(|| format!("write {page}"))?;
        println!("{page}");
    }
    Ok(())
}

/// Fails for a page that is not what the code says.
pub fn check(workspace: &Workspace) -> Result<()> {
    for (page, package, example) in PAGES {
        let committed = std::fs::read(workspace.root().join(page)).with_context(|| format!("read {page}"))?;
        let current = generate(workspace, package, example)?;
        ensure!(committed == current, "{page} is not current: run `cargo xtask docs` and commit it");
    }
    Ok(())
}

fn generate(workspace: &Workspace, package: &str, example: &str) -> Result<Vec<u8>> {
    let output = workspace
        .cargo(&["run", "--quiet", "--package", package, "--example", example])
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("run the example {example} of {package}"))?;
    ensure!(output.status.success(), "the example {example} of {package} failed: {}", output.status);
    ensure!(!output.stdout.is_empty(), "the example {example} of {package} printed nothing");
    Ok(output.stdout)
}
