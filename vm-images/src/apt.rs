//! A private apt: its own lists, an empty package status, the system's mirror and Debian's archive keys.
//!
//! The system's package state is neither read nor changed, so this works without root and for suites other than the
//! machine's own. apt verifies the archive's signatures and every file's hash; nothing is trusted that it does not.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cache::{Cache, content_name};
use crate::error::{Context, Error, Result};
use crate::progress::Step;
use crate::recipe::Recipe;
use crate::{mirror, tool};

/// Keys of the Debian archive (package debian-archive-keyring).
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// apt settings of the system that are carried over: how to reach the network, and the clock checks that a mirror of
/// frozen snapshots needs off. Nothing that weakens signatures.
const CARRIED: &[&str] = &[
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::Retries ",
    "Acquire::ForceIPv",
    "Acquire::Check-Valid-Until ",
    "Acquire::Check-Date ",
];

/// A package at a version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its full version, with epoch and Debian revision.
    pub version: String,
}

/// The private apt of a cache.
#[derive(Debug)]
pub struct Apt {
    directory: PathBuf,
    mirror: String,
    carried: String,
    updated: BTreeSet<String>,
}

impl Apt {
    /// Prepares the private apt below `cache`.
    ///
    /// # Errors
    /// Missing tools or keys with the command that installs them, [`Error::NoMirror`], or a failed file operation.
    pub fn open(cache: &Cache) -> Result<Self> {
        tool::require(&["apt-get", "apt-cache", "apt-config", "dpkg", "dpkg-deb"])?;
        if !Path::new(KEYRING).exists() {
            return Err(Error::MissingTools {
                missing: KEYRING.to_owned(),
                install: tool::install_command(&["debian-archive-keyring"]),
            });
        }
        let directory = cache.root().join("apt");
        for part in ["lists/partial", "archives/partial", "conf"] {
            let path = directory.join(part);
            fs::create_dir_all(&path).at("create", &path)?;
        }
        let status = directory.join("status");
        fs::write(&status, "").at("write", &status)?;
        let dump = tool::output(Command::new("apt-config").arg("dump"))?;
        let carried = dump.lines().filter(|line| CARRIED.iter().any(|prefix| line.starts_with(prefix))).fold(
            String::new(),
            |mut text, line| {
                text.push_str(line);
                text.push('\n');
                text
            },
        );
        Ok(Self { directory, mirror: mirror::find()?, carried, updated: BTreeSet::new() })
    }

    /// The packages that a recipe unpacks, at the versions that the mirror has now.
    ///
    /// # Errors
    /// A failed apt call, or [`Error::Package`] when a version is lower than the recipe allows.
    pub fn resolve(&mut self, recipe: &Recipe, step: &Step) -> Result<Vec<Package>> {
        for suite in &recipe.suites {
            if self.updated.insert(suite.clone()) {
                step.doing(&format!("reading the package list of {suite}"));
                self.update(suite)?;
            }
        }
        let configuration = self.configuration(&recipe.suites, recipe)?;
        let mut packages = if recipe.dependencies {
            let mut command = Self::command("apt-get", &configuration);
            command.args(["-q", "-s", "--no-install-recommends", "install"]).args(&recipe.install);
            simulated(&tool::output(&mut command)?)
        } else {
            let mut found = Vec::new();
            for name in &recipe.install {
                let mut command = Self::command("apt-cache", &configuration);
                let text = tool::output(command.args(["show", "--no-all-versions", name]))?;
                let version =
                    text.lines().find_map(|line| line.strip_prefix("Version: ")).unwrap_or_default();
                found.push(Package { name: name.clone(), version: version.trim().to_owned() });
            }
            found
        };
        for (name, least) in &recipe.at_least {
            let found =
                packages.iter().find(|package| package.name == *name).map(|package| package.version.as_str());
            let serves = found.is_some_and(|version| {
                let mut compare = Command::new("dpkg");
                compare.args(["--compare-versions", version, "ge", least]);
                tool::output(&mut compare).is_ok()
            });
            if !serves {
                return Err(Error::Package {
                    package: name.clone(),
                    found: found.unwrap_or("none").to_owned(),
                    expected: format!("{least} or newer in {}", recipe.suites.join(", ")),
                });
            }
        }
        packages.retain(|package| recipe.wants(&package.name));
        packages.sort();
        Ok(packages)
    }

    /// Downloads `packages` into `directory` as .deb files. apt checks each against the signed lists.
    ///
    /// # Errors
    /// A failed apt call, or fewer files than packages.
    pub fn download(
        &self,
        recipe: &Recipe,
        packages: &[Package],
        directory: &Path,
        step: &Step,
    ) -> Result<Vec<PathBuf>> {
        let configuration = self.configuration(&recipe.suites, recipe)?;
        let mut command = Self::command("apt-get", &configuration);
        command.args(["-q", "-o", "APT::Status-Fd=1", "download"]);
        command.args(packages.iter().map(|package| format!("{}={}", package.name, package.version)));
        command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |status: String, output: &str| Error::Command {
            command: "apt-get download".to_owned(),
            status,
            output: tool::last_lines(output, 8),
        };
        let mut child = command.spawn().map_err(|error| failed(error.to_string(), ""))?;
        let errors = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = String::new();
                // What could not be read is only missing from an error message.
                let _ = pipe.read_to_string(&mut text);
                text
            })
        });
        if let Some(pipe) = child.stdout.take() {
            for line in BufReader::new(pipe).lines().map_while(std::result::Result::ok) {
                if let Some((percent, doing)) = download_status(&line) {
                    step.percent(percent, doing);
                }
            }
        }
        let status = child.wait().map_err(|error| failed(error.to_string(), ""))?;
        let errors = errors.and_then(|thread| thread.join().ok()).unwrap_or_default();
        if !status.success() {
            return Err(failed(status.to_string(), &errors));
        }
        let mut files: Vec<PathBuf> = fs::read_dir(directory)
            .at("read", directory)?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .collect();
        files.sort();
        if files.len() != packages.len() {
            return Err(failed(format!("{} files for {} packages", files.len(), packages.len()), &errors));
        }
        Ok(files)
    }

    fn update(&self, suite: &str) -> Result<()> {
        let empty = Recipe {
            suites: vec![suite.to_owned()],
            pin: Default::default(),
            install: Vec::new(),
            dependencies: false,
            keep: Vec::new(),
            drop: Vec::new(),
            at_least: Default::default(),
        };
        let configuration = self.configuration(&empty.suites, &empty)?;
        // Without Error-Mode apt-get update calls a list that it could not fetch a warning and succeeds.
        let mut command = Self::command("apt-get", &configuration);
        tool::output(command.args(["-q", "-o", "APT::Update::Error-Mode=any", "update"])).map(drop)
    }

    fn command(program: &str, configuration: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", configuration)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Writes the configuration for a combination of suites and pins; returns the file for `APT_CONFIG`, which apt
    /// reads before and instead of the system's.
    fn configuration(&self, suites: &[String], recipe: &Recipe) -> Result<PathBuf> {
        let mut sources = String::new();
        for suite in suites {
            let _ = writeln!(sources, "deb [signed-by={KEYRING} arch=amd64] {} {suite} main", self.mirror);
        }
        let mut preferences = String::new();
        for (packages, suite) in &recipe.pin {
            let _ = writeln!(preferences, "Package: {packages}\nPin: release n={suite}\nPin-Priority: 990\n");
        }
        let name = content_name([sources.as_bytes(), preferences.as_bytes(), self.carried.as_bytes()]);
        let directory = self.directory.join("conf").join(name);
        fs::create_dir_all(&directory).at("create", &directory)?;
        let write = |file: &str, text: &str| {
            let path = directory.join(file);
            fs::write(&path, text).at("write", &path).map(|()| path)
        };
        let sources = write("sources.list", &sources)?;
        let preferences = write("preferences", &preferences)?;
        let root = self.directory.display();
        let text = format!(
            "Dir::Etc::main \"/dev/null\";\nDir::Etc::parts \"/dev/null\";\n\
             Dir::Etc::sourcelist \"{sources}\";\nDir::Etc::sourceparts \"/dev/null\";\n\
             Dir::Etc::preferences \"{preferences}\";\nDir::Etc::preferencesparts \"/dev/null\";\n\
             Dir::State \"{root}\";\nDir::State::lists \"{root}/lists\";\nDir::State::status \"{root}/status\";\n\
             Dir::Cache \"{root}\";\nDir::Cache::archives \"{root}/archives\";\n\
             Dir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\nDir::Log \"{root}\";\n\
             APT::Architecture \"amd64\";\nAPT::Architectures {{ \"amd64\"; }};\n\
             APT::Install-Recommends \"false\";\nAPT::Sandbox::User \"root\";\nAPT::Get::List-Cleanup \"false\";\n\
             Acquire::Languages \"none\";\nAcquire::AllowInsecureRepositories \"false\";\n\
             Acquire::AllowWeakRepositories \"false\";\nAPT::Get::AllowUnauthenticated \"false\";\n{}",
            self.carried,
            sources = sources.display(),
            preferences = preferences.display(),
        );
        write("apt.conf", &text)
    }
}

/// Packages of a simulated installation: lines such as `Inst libc6 (2.41-12 Debian:13.8/stable [amd64]) []`.
fn simulated(text: &str) -> Vec<Package> {
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("Inst ")?.split_once(' ')?;
            let version = rest.split_once('(')?.1.split_whitespace().next()?;
            Some(Package { name: name.to_owned(), version: version.to_owned() })
        })
        .collect()
}

/// Percentage and text of a status line such as `dlstatus:2:88.18:Retrieving file 2 of 2`.
fn download_status(line: &str) -> Option<(f64, &str)> {
    let mut fields = line.strip_prefix("dlstatus:")?.splitn(3, ':');
    let percent = fields.nth(1)?.parse().ok()?;
    Some((percent, fields.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of apt-get 2.6 and 3.0, cut to three packages.
    #[test]
    fn a_simulated_installation_is_read() {
        let text = "NOTE: This is only a simulation!\nInst gcc-14-base (14.2.0-19 Debian:13.8/stable [amd64])\n\
                    Inst libc6 (2.41-12+deb13u5 Debian:13.8/stable [amd64]) []\n\
                    Inst libattr1 [1:2.5.1] (1:2.5.2-3 Debian:13.8/stable [amd64])\nConf libc6 (2.41-12 x [amd64])\n";
        let found = simulated(text);
        let pairs: Vec<(&str, &str)> = found.iter().map(|p| (p.name.as_str(), p.version.as_str())).collect();
        assert_eq!(
            pairs,
            [("gcc-14-base", "14.2.0-19"), ("libc6", "2.41-12+deb13u5"), ("libattr1", "1:2.5.2-3")]
        );
    }

    #[test]
    fn a_status_line_is_read() {
        assert_eq!(
            download_status("dlstatus:2:88.1822:Retrieving file 2 of 2"),
            Some((88.1822, "Retrieving file 2 of 2"))
        );
        assert_eq!(download_status("Get:1 something"), None);
    }
}
