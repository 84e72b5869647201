//! Debian's unmodified rocminfo: natively on the model, and in loop-back through daemon and worker. Both must print the
//! same GPUs, line by line.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "all of this is tests")]

use std::path::Path;
use std::time::Duration;

use virtio_kfd_tests::native::{SETS, runtime, text};
use virtio_kfd_tests::rocminfo::{agents, differences, gpus, system};
use virtio_kfd_tests::{Artifacts, Daemon, Runtime, Under, need};

const LIMIT: Duration = Duration::from_secs(240);

/// Lines of a GPU's section that may differ between native and through the stack: none.
const GPU_MAY_DIFFER: &[&str] = &[];

fn rocminfo(runtime: &Runtime, under: &Under<'_>, environment: &[(&str, &str)]) -> anyhow::Result<String> {
    let mut command = under.command(runtime, Path::new("rocminfo"))?;
    command.envs(environment.iter().copied());
    text(command, LIMIT)
}

macro_rules! parts {
    ($artifacts:ident) => {
        let $artifacts = need!(Artifacts::for_thunk(&[], &SETS));
    };
}

/// What of rocminfo's output may differ in loop-back, beside the GPUs' sections: nothing either, as the CPU is the same
/// machine's. The runtime prints no time that runs; the frequency of its clock is the same.
#[test]
fn a_gpu_is_the_same_natively_and_in_loopback() {
    parts!(artifacts);
    for set in SETS {
        let runtime = runtime(&artifacts, set).unwrap();
        let native = rocminfo(&runtime, &Under::model(&artifacts, "gfx906").unwrap(), &[]).unwrap();
        let daemon = Daemon::start(&artifacts, "model:gfx906", &[]).unwrap();
        let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
        let ours = rocminfo(&runtime, &under, &[])
            .unwrap_or_else(|error| panic!("{set}: {error:#}\n{}", daemon.report()));
        let (native_gpus, our_gpus) = (gpus(&native), gpus(&ours));
        assert_eq!((native_gpus.len(), our_gpus.len()), (1, 1), "{set}:\n{ours}");
        assert_eq!(native_gpus[0].value("Name"), Some("gfx906"), "{set}");
        assert!(native_gpus[0].lines.len() > 60, "{set}: a whole section");
        let differ = differences(&native_gpus[0], &our_gpus[0], GPU_MAY_DIFFER);
        assert!(differ.is_empty(), "{set}: native | loop-back\n{}", differ.join("\n"));
        assert_eq!(system(&native), system(&ours), "{set}");
        let (native, ours) = (agents(&native), agents(&ours));
        assert_eq!((native.len(), ours.len()), (2, 2), "{set}");
        let differ = differences(&native[0], &ours[0], &[]);
        assert!(differ.is_empty(), "{set}: the CPU: native | loop-back\n{}", differ.join("\n"));
    }
}

/// Case C50: which GPUs `ROCR_VISIBLE_DEVICES` leaves, and in which order, is decided by the runtime on what the guest
/// library tells it. Expected selections: ROCm's documentation of the variable and `GpuAgent` filtering of ROCr
/// (an empty value hides all, an index that is none ends the list, UUIDs select).
#[test]
fn visible_devices_select_the_same_gpus() {
    parts!(artifacts);
    let runtime = runtime(&artifacts, "rocm-trixie").unwrap();
    let model = Under::model(&artifacts, "gfx906x2").unwrap();
    let daemon = Daemon::start(&artifacts, "model:gfx906x2", &[]).unwrap();
    let loopback = Under::loopback(&artifacts, daemon.socket()).unwrap();
    let uuids = |environment: &[(&str, &str)]| {
        let list = |text: &str| -> Vec<String> {
            gpus(text).iter().map(|gpu| gpu.value("Uuid").unwrap_or_default().to_owned()).collect()
        };
        let native = rocminfo(&runtime, &model, environment).unwrap();
        let ours = rocminfo(&runtime, &loopback, environment)
            .unwrap_or_else(|error| panic!("{environment:?}: {error:#}\n{}", daemon.report()));
        for (a, b) in gpus(&native).iter().zip(&gpus(&ours)) {
            let differ = differences(a, b, GPU_MAY_DIFFER);
            assert!(differ.is_empty(), "{environment:?}: native | loop-back\n{}", differ.join("\n"));
        }
        assert_eq!(list(&native), list(&ours), "{environment:?}");
        list(&ours)
    };
    let all = uuids(&[]);
    let [first, second] = all.as_slice() else { panic!("{all:?}") };
    assert!(first != second && first.starts_with("GPU-") && !first.ends_with("XX"), "{all:?}");
    let visible = |value: &str| uuids(&[("ROCR_VISIBLE_DEVICES", value)]);
    assert_eq!(visible("0"), [first.as_str()]);
    assert_eq!(visible("1"), [second.as_str()]);
    assert_eq!(visible("1,0"), [second.as_str(), first.as_str()]);
    assert_eq!(visible(second), [second.as_str()]);
    assert_eq!(visible("0,7,1"), [first.as_str()]);
    assert_eq!(visible("7"), [""; 0]);
    assert_eq!(visible(""), [""; 0]);
}

/// The other boards of the model list as well, whatever the runtime knows of them.
#[test]
fn every_profile_is_the_same_natively_and_in_loopback() {
    parts!(artifacts);
    let runtime = runtime(&artifacts, "rocm-trixie").unwrap();
    for profile in ["gfx900", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx906x2-pcie"] {
        let native = rocminfo(&runtime, &Under::model(&artifacts, profile).unwrap(), &[])
            .unwrap_or_else(|error| panic!("{profile}: {error:#}"));
        let daemon = Daemon::start(&artifacts, &format!("model:{profile}"), &[]).unwrap();
        let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
        let ours = rocminfo(&runtime, &under, &[])
            .unwrap_or_else(|error| panic!("{profile}: {error:#}\n{}", daemon.report()));
        let (native, ours) = (gpus(&native), gpus(&ours));
        assert!(!native.is_empty() && native.len() == ours.len(), "{profile}: {} GPUs", ours.len());
        for (a, b) in native.iter().zip(&ours) {
            let name = a.value("Name").unwrap_or_default();
            assert!(profile.starts_with(name), "{profile}: {name}");
            let differ = differences(a, b, GPU_MAY_DIFFER);
            assert!(differ.is_empty(), "{profile}: native | loop-back\n{}", differ.join("\n"));
        }
    }
}

/// Case C49: without a daemon there is a clean status and no crash; without a GPU there is the CPU alone.
#[test]
fn no_device_and_no_gpu_are_clean_ends() {
    parts!(artifacts);
    let runtime = runtime(&artifacts, "rocm-trixie").unwrap();
    let nowhere = Under::loopback(&artifacts, Path::new("/nonexistent/socket")).unwrap();
    let mut command = nowhere.command(&runtime, Path::new("rocminfo")).unwrap();
    // Errors; like AMD's, the library is silent otherwise.
    command.env("HSAKMT_DEBUG_LEVEL", "3");
    let output = virtio_kfd_tests::native::run(command, LIMIT).unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("/nonexistent/socket"), "the reason is said: {said}");

    let daemon = Daemon::start(&artifacts, "model:none", &[]).unwrap();
    let under = Under::loopback(&artifacts, daemon.socket()).unwrap();
    let text =
        rocminfo(&runtime, &under, &[]).unwrap_or_else(|error| panic!("{error:#}\n{}", daemon.report()));
    let found = agents(&text);
    assert_eq!((found.len(), gpus(&text).len()), (1, 0), "{text}");
}
