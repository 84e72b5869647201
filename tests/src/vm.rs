//! Virtual machines: built, booted to the agent, and never left behind.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use virtio_kfd_images::{Archive, Layer};

use crate::accel::Accel;
use crate::artifacts::Artifacts;
use crate::guest::Guest;
use crate::host::Daemon;
use crate::process::{Keeper, tail};
use crate::qmp::Qmp;

/// The socket of QEMU's monitor, in the machine's directory.
const MONITOR: &str = "monitor";

/// Describes a virtual machine; [`VmBuilder::boot`] starts it.
#[derive(Debug)]
pub struct VmBuilder {
    artifacts: Artifacts,
    overlay: Archive,
    memory_mib: u32,
    memory_slots: Option<u32>,
    cpus: u32,
    limit: Duration,
    accel: Option<Accel>,
    modules: Vec<String>,
    parameters: Vec<String>,
    layers: Vec<String>,
    vhost_user: Option<PathBuf>,
    arguments: Vec<String>,
}

impl VmBuilder {
    /// A machine with 2 CPUs, 1 GiB of memory, no GPU, no modules, and 5 minutes to live.
    ///
    /// # Errors
    /// The agent has not been built.
    pub fn new(artifacts: &Artifacts) -> Result<Self> {
        Ok(Self {
            artifacts: artifacts.clone(),
            overlay: artifacts.overlay()?,
            memory_mib: 1024,
            memory_slots: None,
            cpus: 2,
            limit: Duration::from_secs(300),
            accel: None,
            modules: Vec::new(),
            parameters: Vec::new(),
            layers: Vec::new(),
            vhost_user: None,
            arguments: Vec::new(),
        })
    }

    /// The part of the image that belongs to this machine; files can be added to it.
    pub fn overlay(&mut self) -> &mut Archive {
        &mut self.overlay
    }

    /// Memory in MiB.
    pub fn memory_mib(mut self, memory: u32) -> Self {
        self.memory_mib = memory;
        self
    }

    /// Lets memory be plugged in while the machine runs, up to `most` MiB in all: see [`Vm::monitor`].
    pub fn memory_slots(mut self, most: u32) -> Self {
        self.memory_slots = Some(most);
        self
    }

    /// Number of virtual CPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// The whole life of the machine; it is killed afterwards.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets the accelerator; by default the one that works here is found out.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = Some(accel);
        self
    }

    /// Loads a kernel module of the image (with what it needs) before the agent starts.
    pub fn module(mut self, name: &str) -> Self {
        self.modules.push(name.to_owned());
        self
    }

    /// Puts a layer (`recipes/image.toml`) of a package set in the cache into the image.
    pub fn layer(mut self, name: &str) -> Self {
        self.layers.push(name.to_owned());
        self
    }

    /// Adds a kernel parameter.
    pub fn parameter(mut self, parameter: &str) -> Self {
        self.parameters.push(parameter.to_owned());
        self
    }

    /// Adds a virtio-gpu device (virtio id 16) that the vhost-user back-end listening at `socket` serves, and loads its
    /// driver.
    pub fn vhost_user_gpu(mut self, socket: &Path) -> Self {
        self.vhost_user = Some(socket.to_owned());
        self.module("virtio_gpu")
    }

    /// Starts the machine with a virtio-gpu device that `daemon` serves, and waits for its agent.
    ///
    /// # Errors
    /// As for [`boot`](Self::boot); the message has the daemon's log as well.
    pub fn boot_on(self, daemon: &Daemon) -> Result<Guest> {
        self.vhost_user_gpu(daemon.socket()).boot().with_context(|| daemon.report())
    }

    /// Adds an argument of QEMU.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Starts the machine and waits for its agent.
    ///
    /// # Errors
    /// Artifacts that are not there, or a guest that ends or does not come up within its limit; the message carries the
    /// end of its console and of QEMU's output.
    pub fn boot(self) -> Result<Guest> {
        let qemu = self.artifacts.qemu()?;
        let image = self.artifacts.image()?;
        let accel = match self.accel {
            Some(accel) => accel,
            None => Accel::choose(self.artifacts.cache(), &qemu, image.kernel())?,
        };
        let directory =
            tempfile::Builder::new().prefix("kfd-vm-").tempdir().context("temporary directory")?;
        let place = |name: &str| directory.path().join(name);
        let initrd = place("initrd");
        let layers: Vec<Layer> =
            self.layers.iter().map(|name| self.artifacts.layer(name)).collect::<Result<_>>()?;
        image.with_layers(&layers, &self.overlay, &initrd)?;
        let socket = place("agent");
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("listen at {}", socket.display()))?;

        let mut command = qemu.command();
        command.args(accel.arguments());
        command.args(["-M", "q35,memory-backend=memory", "-smp"]).arg(self.cpus.to_string());
        let slots = self.memory_slots.map(|most| format!(",slots=4,maxmem={most}M")).unwrap_or_default();
        command.args(["-m", &format!("{}M{slots}", self.memory_mib), "-object"]);
        command.arg(format!("memory-backend-memfd,id=memory,size={}M,share=on", self.memory_mib));
        command.arg("-kernel").arg(image.kernel()).arg("-initrd").arg(&initrd);
        // Where the CPU is emulated and the machine is busy, the timer's ticks come too late for the kernel's test of them, and it
        // panics ("IO-APIC + timer doesn't work"). Under KVM it leaves the test out by itself.
        let mut parameters =
            format!("console=ttyS0 panic=-1 no_timer_check kfd.modules={}", self.modules.join(","));
        for parameter in &self.parameters {
            parameters.push(' ');
            parameters.push_str(parameter);
        }
        command.arg("-append").arg(parameters);
        command.arg("-serial").arg(format!("file:{}", place("console").display()));
        command.args(["-device", "virtio-serial-pci", "-chardev"]);
        command.arg(format!("socket,id=agent,path={}", socket.display()));
        command.args(["-device", &format!("virtserialport,chardev=agent,name={}", kfd_agent::wire::PORT)]);
        if let Some(backend) = &self.vhost_user {
            command.arg("-chardev").arg(format!("socket,id=gpu,path={}", backend.display()));
            command.args([
                "-device",
                "vhost-user-test-device-pci,chardev=gpu,virtio-id=16,num_vqs=2,vq_size=1024,config_size=20",
            ]);
        }
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", place(MONITOR).display()));
        command.args(&self.arguments);

        let log = place("qemu.log");
        let vm = Vm {
            keeper: Some(Keeper::start(command, &log, self.limit)?),
            console: place("console"),
            log,
            directory,
        };
        let connection = vm.accept(&listener, self.limit)?;
        let guest = Guest::connect(connection, vm, self.limit)?;
        // It is in the guest's memory now, and large.
        std::fs::remove_file(&initrd).with_context(|| format!("remove {}", initrd.display()))?;
        Ok(guest)
    }
}

/// A running virtual machine; it is killed when dropped.
#[derive(Debug)]
pub struct Vm {
    keeper: Option<Keeper>,
    console: PathBuf,
    log: PathBuf,
    directory: tempfile::TempDir,
}

impl Vm {
    /// Describes a new machine.
    ///
    /// # Errors
    /// The agent has not been built.
    pub fn builder(artifacts: &Artifacts) -> Result<VmBuilder> {
        VmBuilder::new(artifacts)
    }

    /// What the guest printed on its serial console so far.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// What QEMU itself printed so far.
    pub fn qemu_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// QEMU's monitor. It serves one connection at a time.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn monitor(&self) -> Result<Qmp> {
        Qmp::connect(&self.directory.path().join(MONITOR))
    }

    /// Process id of QEMU.
    pub fn pid(&self) -> Option<u32> {
        self.keeper.as_ref().map(Keeper::pid)
    }

    /// Whether QEMU still runs.
    pub fn is_running(&self) -> bool {
        self.keeper.as_ref().is_some_and(Keeper::is_running)
    }

    /// A directory that lives as long as the machine.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The ends of console and QEMU output, for messages.
    pub fn report(&self) -> String {
        format!("--- QEMU:\n{}\n--- console:\n{}", tail(&self.qemu_log(), 20), tail(&self.console(), 60))
    }

    /// Waits until QEMU connects to the agent's socket, which it does before the guest starts.
    fn accept(&self, listener: &UnixListener, limit: Duration) -> Result<UnixStream> {
        listener.set_nonblocking(true).context("agent socket")?;
        let start = Instant::now();
        loop {
            match listener.accept() {
                Ok((connection, _)) => {
                    connection.set_nonblocking(false).context("agent socket")?;
                    return Ok(connection);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("accept QEMU's connection for the agent"),
            }
            if !self.is_running() || start.elapsed() > limit {
                bail!("QEMU did not start the guest\n{}", self.report());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the machine and returns what it printed on its console.
    pub fn kill(mut self) -> String {
        self.keeper = None;
        self.console()
    }
}
