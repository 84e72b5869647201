//! Open, close, version.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::topology::HsaVersionInfo;

use super::caller::layout;
use super::exports;
use super::pointer::Out;
use crate::thunk::open;

exports! {
    "open";
    /// Opens the way to the driver; counts.
    done
    fn hsaKmtOpenKFD() { open::open(!layout().says_what_it_executes()) }

    /// Closes it, when it was called as often as the open.
    done("the last close also frees what is still allocated, and ends waits")
    fn hsaKmtCloseKFD() { open::close() }

    /// Whether AMD's own simulator stands under the library.
    done
    fn hsaKmtModelEnabled(enable: Out<bool>) {
        enable.required("enable")?.write(false);
        Ok(())
    }

    /// The version of the driver's interface.
    done("the host's KFD")
    fn hsaKmtGetVersion(version_info: Out<HsaVersionInfo>) {
        let thunk = open::current()?;
        let (major, minor) = thunk.client.kfd_version();
        version_info.required("VersionInfo")?.write(HsaVersionInfo {
            kernel_interface_major_version: major,
            kernel_interface_minor_version: minor,
        });
        Ok(())
    }
}
