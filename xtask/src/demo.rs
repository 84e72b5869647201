//! `cargo xtask demo`: Debian's rocminfo in an unmodified guest, on a simulated GPU of the host.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_kfd_images::{BaseImage, Cache, Fetcher, tool};
use virtio_kfd_tests::{Artifacts, Keeper, Vm, guest};

use crate::thunk;
use crate::workspace::Workspace;

/// How long the demo's processes may live once everything is built.
const LIMIT: Duration = Duration::from_secs(240);

/// Options of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// GPU profile of the model.
    #[arg(long, default_value = "gfx906")]
    profile: String,
    /// Print what daemon and guest logged, also when all went well.
    #[arg(long)]
    verbose: bool,
    /// Program to run in the guest, with its arguments.
    #[arg(last = true)]
    command: Vec<String>,
}

/// Runs the demo; the answer is the exit status of the program in the guest.
pub fn run(options: &Options) -> Result<i32> {
    let begin = Instant::now();
    let workspace = Workspace::find()?;
    tool::require(&["cc", "objcopy", "apt-get", "dpkg-deb"])?;
    let cache = Cache::open()?;
    prepare(&workspace, &cache)?;
    let artifacts = Artifacts::of_workspace(workspace.target(), &cache);
    artifacts.image()?;

    let directory = tempfile::Builder::new().prefix("kfd-demo-").tempdir().context("temporary directory")?;
    let socket = directory.path().join("gpu");
    let daemon = daemon(&artifacts, &options.profile, &socket, &directory.path().join("daemon.log"))?;
    eprintln!("demo: daemon on the model {}", options.profile);
    let boot = Instant::now();
    let booted = Vm::builder(&artifacts)?.module("amdgpu").vhost_user_gpu(&socket).limit(LIMIT).boot();
    let guest = booted.map_err(|error| error.context(daemon.report()))?;
    eprintln!("demo: guest with kernel {} ({:.1} s)", guest.hello().kernel, boot.elapsed().as_secs_f64());
    let (program, arguments) = match options.command.split_first() {
        Some((program, arguments)) => (program.as_str(), arguments),
        None => ("rocminfo", [].as_slice()),
    };
    let mut command = guest::Command::new(program).limit(LIMIT);
    for argument in arguments {
        command = command.arg(argument);
    }
    let output = guest.run(&command).map_err(|error| error.context(daemon.report()))?;
    std::io::stdout().write_all(&output.stdout).context("print the output")?;
    std::io::stderr().write_all(&output.stderr).context("print the output")?;
    let status = output.exit.code.unwrap_or(128);
    if options.verbose || status != 0 {
        eprintln!("{}\n{}", daemon.report(), guest.vm().report());
    }
    eprintln!("demo: {program} ended with status {status} ({:.1} s in all)", begin.elapsed().as_secs_f64());
    if output.exit.timed_out {
        bail!("{program} was killed after {} s", LIMIT.as_secs());
    }
    Ok(status)
}

/// Fetches and builds what a guest on the model needs.
fn prepare(workspace: &Workspace, cache: &Cache) -> Result<()> {
    let mut fetcher = Fetcher::new(cache, false);
    fetcher.ensure("qemu")?;
    for set in BaseImage::sets()? {
        fetcher.ensure(&set)?;
    }
    workspace.build()?;
    thunk::link(workspace)?;
    Ok(())
}

/// Starts the daemon on the model and waits until it listens.
fn daemon(artifacts: &Artifacts, profile: &str, socket: &PathBuf, log: &std::path::Path) -> Result<Keeper> {
    let mut command = Command::new(artifacts.program("vhost-user-kfd")?);
    command.arg("--socket").arg(socket).arg("--kfd").arg(format!("model:{profile}"));
    let daemon = Keeper::start(command, log, LIMIT)?;
    daemon.wait_for_path(socket, Duration::from_secs(30))?;
    Ok(daemon)
}
