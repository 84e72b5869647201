//! Where the workspace and its build results lie, and how cargo is called.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use virtio_kfd_images::tool;
use virtio_kfd_tests::artifacts::AGENT_TARGET;

/// The programs and libraries of the host's side, by package.
const PROGRAMS: &[&str] =
    &["vhost-user-kfd", "kfd-worker", "kfd-model-preload", "guest-thunk", "kfd-loopback-vm"];

/// The guest's KFD-level library. Built together with guest-thunk it would export that crate's C functions as well.
const SEAM: &[&str] = &["kfd-preload"];

/// Programs that only the tests run, on the host and in guests, by package.
const TEST_PROGRAMS: &[&str] = &["kfd-oracle", "kfd-hostile"];

/// The workspace that this program was built in.
#[derive(Debug, Clone)]
pub struct Workspace {
    root: PathBuf,
    target: PathBuf,
}

impl Workspace {
    /// Finds the workspace.
    pub fn find() -> Result<Self> {
        let own = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let root = own.parent().context("xtask's directory has no parent")?.to_owned();
        let metadata = cargo_metadata::MetadataCommand::new()
            .manifest_path(root.join("Cargo.toml"))
            .no_deps()
            .exec()
            .context("cargo metadata")?;
        Ok(Self { root, target: metadata.target_directory.into() })
    }

    /// The checkout's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// cargo's target directory.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where release programs are built.
    pub fn programs(&self) -> PathBuf {
        self.target.join("release")
    }

    /// Where the guest agent is built.
    pub fn agent(&self) -> PathBuf {
        self.target.join(AGENT_TARGET).join("release/kfd-agent")
    }

    /// Where the guest library is linked.
    pub fn thunk(&self) -> PathBuf {
        self.target.join("thunk/libhsakmt.so.1")
    }

    /// Where `libdtif.so` is linked.
    pub fn dtif(&self) -> PathBuf {
        self.target.join("thunk/libdtif.so")
    }

    /// The directory where `libhsakmt_virtio` is linked, for each layout in a directory of its own.
    pub fn virtio(&self) -> PathBuf {
        self.target.join("thunk/virtio")
    }

    /// A cargo command in the workspace.
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(arguments).current_dir(&self.root);
        command
    }

    /// Builds daemon, worker, model, guest libraries (libhsakmt not yet linked) and guest agent in release mode. cargo shows its own
    /// progress.
    pub fn build(&self) -> Result<()> {
        self.build_for_host()?;
        eprintln!("build: kfd-agent");
        let mut agent = self.cargo(&["build", "--release", "-p", "kfd-agent", "--target", AGENT_TARGET]);
        // Static, so that it runs in any guest whatever its C library.
        agent.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static\u{1f}-Cstrip=symbols");
        run(&mut agent)
    }

    /// Builds what [`Self::build`] does without the guest agent.
    pub fn build_for_host(&self) -> Result<()> {
        tool::require(&["cc"])?;
        self.build_packages(PROGRAMS)?;
        self.build_packages(SEAM)
    }

    /// Builds what only the tests need, in release mode.
    pub fn build_test_programs(&self) -> Result<()> {
        self.build_packages(TEST_PROGRAMS)
    }

    fn build_packages(&self, packages: &[&str]) -> Result<()> {
        eprintln!("build: {}", packages.join(", "));
        let mut build = self.cargo(&["build", "--release"]);
        for package in packages {
            build.args(["-p", package]);
        }
        run(&mut build)
    }
}

/// Runs a command whose output goes to the terminal.
pub fn run(command: &mut Command) -> Result<()> {
    let name = tool::describe(command);
    let status = command.status().with_context(|| format!("start {name}"))?;
    if !status.success() {
        bail!("{name} failed ({status})");
    }
    Ok(())
}

/// Files of a directory whose names end in `extension`, sorted.
pub fn with_extension(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    found.sort();
    Ok(found)
}
