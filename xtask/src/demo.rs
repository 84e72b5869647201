//! `cargo xtask demo`: Debian's rocminfo in an unmodified guest, on a simulated GPU of the host; HIP and OpenCL programs with
//! `demo hip`, and a runtime that carries AMD's thunk inside with `demo rocm7`.

mod hip;
mod rocm7;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_kfd_images::{BaseImage, Cache, Fetcher, tool};
use virtio_kfd_tests::accel::Accel;
use virtio_kfd_tests::{Artifacts, Vm, guest};

use crate::stack::{self, Stack};
use crate::thunk;
use crate::workspace::Workspace;

/// How long the demo's processes may live once everything is built.
const LIMIT: Duration = Duration::from_secs(240);

/// Options of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Where the program runs.
    #[arg(value_enum, default_value = "vm")]
    place: Place,
    /// GPU profile of the model: a name, or a path of a profile's file.
    #[arg(long, default_value = "gfx906", value_parser = stack::profile)]
    profile: String,
    /// Print what daemon and guest logged, also when all went well.
    #[arg(long)]
    verbose: bool,
    /// Program to run, with its arguments; rocminfo if none is given.
    #[arg(last = true)]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    /// In a QEMU guest.
    Vm,
    /// On the host, the guest library playing VMM and driver.
    Loopback,
    /// HIP and OpenCL programs in a QEMU guest, each of which checks its own results.
    Hip,
    /// rocminfo and HIP programs of ROCm 7.2, whose runtime carries AMD's thunk inside, in a QEMU guest.
    Rocm7,
}

impl Options {
    /// That nothing is asked for that the place does not do.
    fn check(&self) -> Result<()> {
        if !matches!(self.place, Place::Hip | Place::Rocm7) {
            return Ok(());
        }
        let place = clap::ValueEnum::to_possible_value(&self.place);
        let place = place.as_ref().map_or("", |place| place.get_name());
        if self.profile != hip::GPU {
            bail!(
                "demo {place}: its programs are compiled for {}, not for --profile {}",
                hip::GPU,
                self.profile
            );
        }
        if let Some(program) = self.command.first() {
            bail!("demo {place} runs its own programs, not {program}: use demo vm or demo loopback for that");
        }
        Ok(())
    }
}

/// Runs the demo; the answer is the exit status of the program.
pub fn run(options: &Options) -> Result<i32> {
    let begin = Instant::now();
    options.check()?;
    if options.place != Place::Loopback {
        // Before anything is fetched and built.
        Accel::asked()?;
    }
    let workspace = Workspace::find()?;
    tool::require(&["cc", "objcopy", "apt-get", "dpkg-deb"])?;
    let cache = Cache::open()?;
    let mut fetcher = Fetcher::new(&cache, false);
    eprintln!(
        "demo: Debian packages, programs and guest image are fetched and built first where they are not there yet"
    );
    for set in BaseImage::sets()? {
        fetcher.ensure(&set)?;
    }
    match options.place {
        Place::Vm => fetcher.ensure("qemu").map(drop)?,
        Place::Hip => hip::fetch(&mut fetcher)?,
        Place::Rocm7 => rocm7::fetch(&mut fetcher)?,
        Place::Loopback => {}
    }
    workspace.build()?;
    thunk::link(&workspace)?;
    let artifacts = Artifacts::of_workspace(workspace.target(), &cache);
    let suite = match options.place {
        Place::Hip => Some(hip::run(&workspace, &artifacts, options.verbose)?),
        Place::Rocm7 => Some(rocm7::run(&workspace, &artifacts, options.verbose)?),
        Place::Vm | Place::Loopback => None,
    };
    if let Some(status) = suite {
        eprintln!("demo: {:.1} s in all", begin.elapsed().as_secs_f64());
        return Ok(status);
    }
    let (program, arguments) = match options.command.split_first() {
        Some((program, arguments)) => (program.as_str(), arguments),
        None => ("rocminfo", [].as_slice()),
    };
    let status = match options.place {
        Place::Vm | Place::Hip | Place::Rocm7 => in_guest(&artifacts, options, program, arguments)?,
        Place::Loopback => in_loopback(&artifacts, options, program, arguments)?,
    };
    eprintln!("demo: {program} ended with status {status} ({:.1} s in all)", begin.elapsed().as_secs_f64());
    Ok(status)
}

fn in_guest(artifacts: &Artifacts, options: &Options, program: &str, arguments: &[String]) -> Result<i32> {
    artifacts.image()?;
    let stack = Stack::start(artifacts, &options.profile, LIMIT)?;
    eprintln!("demo: daemon on the model {}", options.profile);
    let boot = Instant::now();
    let booted = Vm::builder(artifacts)?.module("amdgpu").vhost_user_gpu(&stack.socket()).limit(LIMIT).boot();
    let guest = booted.map_err(|error| error.context(stack.report()))?;
    eprintln!("demo: guest with kernel {} ({:.1} s)", guest.hello().kernel, boot.elapsed().as_secs_f64());
    let mut command = guest::Command::new(program).limit(LIMIT);
    for argument in arguments {
        command = command.arg(argument);
    }
    let output = guest.run(&command).map_err(|error| error.context(stack.report()))?;
    std::io::stdout().write_all(&output.stdout).context("print the output")?;
    std::io::stderr().write_all(&output.stderr).context("print the output")?;
    let status = output.exit.code.unwrap_or(128);
    if options.verbose || status != 0 {
        eprintln!("{}\n{}", stack.report(), guest.vm().report());
    }
    if output.exit.timed_out {
        bail!("{program} was killed after {} s", LIMIT.as_secs());
    }
    Ok(status)
}

fn in_loopback(artifacts: &Artifacts, options: &Options, program: &str, arguments: &[String]) -> Result<i32> {
    let stack = Stack::start(artifacts, &options.profile, LIMIT)?;
    eprintln!("demo: daemon on the model {}", options.profile);
    let mut command = stack::loopback(artifacts, &stack.socket(), program)?;
    let status = command.args(arguments).status().with_context(|| format!("start {program}"))?;
    if options.verbose || !status.success() {
        eprintln!("{}", stack.report());
    }
    Ok(status.code().unwrap_or(128))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_place_does_not_do_is_refused() {
        let options = |place, profile: &str, command: &[&str]| Options {
            place,
            profile: profile.to_owned(),
            verbose: false,
            command: command.iter().map(|&text| text.to_owned()).collect(),
        };
        options(Place::Vm, "gfx942", &["env"]).check().unwrap();
        options(Place::Hip, hip::GPU, &[]).check().unwrap();
        let profile = options(Place::Rocm7, "gfx942", &[]).check().unwrap_err().to_string();
        assert!(profile.contains("demo rocm7") && profile.contains("gfx942"), "{profile}");
        let command = options(Place::Hip, hip::GPU, &["rocminfo"]).check().unwrap_err().to_string();
        assert!(command.contains("demo hip") && command.contains("rocminfo"), "{command}");
    }
}
